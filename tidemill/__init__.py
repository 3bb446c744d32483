"""What users import; each name loads on first use, so that `import tidemill` is instant."""

from importlib import import_module

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    homes = {"LLM": "llm", "SamplingParams": "sampling_params", "SparseParams": "sampling_params"}
    if name not in (homes := homes | dict.fromkeys(("Client", "AsyncClient"), "client")):
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}; it has {list(homes)}")
    return getattr(import_module(f"tidemill.{homes[name]}"), name)
