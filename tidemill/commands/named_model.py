"""Whether the model that engines are to be started for exists, asked before any of them is started.

It does not know what is started.
"""

from __future__ import annotations

from engine_service.config import EngineConfig
from engine_service.model_folder import check_model, folder_of


def check(config: EngineConfig) -> None:
    """Raises what `check_model` does, and what the hub says of an id that it does not know."""
    check_model(config.model)
    if folder_of(config.model) is None:
        from engine_service.worker.hub import refuse_unknown  # takes long, and few need it

        refuse_unknown(config.model, config.revision)
