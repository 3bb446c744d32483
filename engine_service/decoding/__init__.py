"""One file per decoding method; every DecodeStrategy in this folder is found by itself."""

from importlib import import_module
from pkgutil import iter_modules

from engine_service.core.strategy import DecodeStrategy as Base


def strategies() -> dict[str, type[Base]]:
    """Decoding methods by name. An import error in a method's file is raised, not skipped."""
    found = [vars(import_module(f"{__name__}.{m.name}")) for m in iter_modules(__path__)]
    kinds = [v for names in found for v in names.values() if isinstance(v, type) and v is not Base]
    return {kind.name: kind for kind in kinds if issubclass(kind, Base)}
