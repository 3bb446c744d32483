"""What clients may call the served model, and what it is called when they read of it.

It does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.runtime.errors import InvalidRequest, NotFound


@dataclass(frozen=True, slots=True)
class ModelNames:
    """`listed` are the names that are told, at least one: the first is that of metrics, log lines
    and whoever asked for none. `model_id`, the engine's own, is answered too."""

    listed: tuple[str, ...]
    model_id: str

    @property
    def first(self) -> str:
        return self.listed[0]

    def called(self, asked: str) -> str:
        """The name that a request for `asked` reads in its answer: the one it wrote; '' is the
        first. Raises NotFound for a name that is none of this model's."""
        if asked in ("", *self.listed, self.model_id):
            return asked or self.first
        raise NotFound(
            f"The model {asked!r} does not exist; this server serves "
            f"{', '.join(map(repr, self.listed))}",
            reason="MODEL_NOT_FOUND",
            param="model",
        )


def read_names(written: str | None, model_id: str) -> ModelNames:
    """Names with commas between them, each once; None is the engine's own. Raises InvalidRequest
    where one is empty."""
    if written is None:
        return ModelNames((model_id,), model_id)
    listed = tuple(dict.fromkeys(name.strip() for name in written.split(",")))
    if "" in listed:
        raise InvalidRequest(
            f"served_model_name {written!r} has an empty name; pass one name, or several with "
            "commas between them",
            param="served_model_name",
        )
    return ModelNames(listed, model_id)
