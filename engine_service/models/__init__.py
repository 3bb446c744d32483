"""Imports every model file, so that `@register_model` has run; a broken file raises here."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
