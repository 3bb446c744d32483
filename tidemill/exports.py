"""Where the names live that `tidemill` gives. It imports none of them before somebody asks."""

from importlib import import_module

HOMES = {"LLM": "llm", "AsyncClient": "client", "Client": "client", "ClientTls": "client"}
"""Public names and their modules."""
_PARAMS = ("BeamSearchParams", "SamplingParams", "SparseParams", "StructuredOutputsParams")
HOMES |= dict.fromkeys(_PARAMS, "sampling_params")


def load(name: str) -> object:
    """The class of that name; AttributeError for others."""
    if name not in HOMES:
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
    return getattr(import_module(f"tidemill.{HOMES[name]}"), name)
