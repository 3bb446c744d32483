"""What users import; each name loads on first use, so that `import tidemill` is instant."""

from importlib import import_module

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    home = {"LLM": "llm", "Client": "client", "AsyncClient": "client", "ClientTls": "client"}
    if name not in home and not name.endswith("Params"):
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
    return getattr(import_module(f"tidemill.{home.get(name, 'sampling_params')}"), name)
