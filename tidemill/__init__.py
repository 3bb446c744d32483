"""What users import; each name loads on first use, so that `import tidemill` is instant."""

from tidemill.exports import HOMES, load

__version__ = "0.1.0"
__all__ = list(HOMES)


def __getattr__(name: str) -> object:
    return load(name)
