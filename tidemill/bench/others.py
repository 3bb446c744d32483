"""Flags that the chosen kind of run does not read: a figure would look as if they had counted. It
knows no benchmark."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from tidemill.runtime.errors import InvalidRequest


def refuse_given(options: object, names: Collection[str], why: str) -> None:
    """Raises InvalidRequest naming the first of these fields of the dataclass that is not at its
    default; `why` says what it is for and what to do."""
    for field in fields(options):  # type: ignore[arg-type]
        if field.name in names and getattr(options, field.name) != field.default:
            raise InvalidRequest(f"{field.name} is for {why}", param=field.name)


FOR_EQUALS = "equal requests; leave it or --set out"
"""`why` of a flag that request sets do not read."""
