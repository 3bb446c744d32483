"""One file per decoding method; every direct DecodeStrategy of this folder is found by itself."""

from importlib import import_module
from pkgutil import iter_modules

from engine_service.core.strategy import DecodeStrategy as Base


def strategies() -> dict[str, type[Base]]:
    """Decoding methods by name. An import error in a method's file is raised, not skipped."""
    names = {import_module(f"{__name__}.{found.name}").__name__ for found in iter_modules(__path__)}
    return {kind.name: kind for kind in Base.__subclasses__() if kind.__module__ in names}
