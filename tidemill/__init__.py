"""What users import; each name loads on first use, so that `import tidemill` is instant."""

from importlib import import_module

__version__ = "0.1.0"
_PARAMS = ("BeamSearchParams", "SamplingParams", "SparseParams", "StructuredOutputsParams")
_HOMES = {"LLM": "llm", "AsyncClient": "client", "Client": "client", "ClientTls": "client"}
_HOMES |= dict.fromkeys(_PARAMS, "sampling_params")
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
    return getattr(import_module(f"tidemill.{_HOMES[name]}"), name)
