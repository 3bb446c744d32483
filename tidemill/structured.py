"""Structured outputs as callers write them, as the one grammar that goes to the engine.

Whether a grammar compiles is the engine's to say. It does not know gRPC.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from tidemill.nesting import check_nesting
from tidemill.runtime.errors import InvalidRequest
from tidemill.sampling_params import StructuredOutputsParams

_KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}


class Reasoning(NamedTuple):
    """Free text that begins with `start`, or has begun already where that is empty, up to `end`; or
    `lark` of a whole output, in which @answer stands for what follows the constraint."""

    start: str = ""
    end: str = ""
    lark: str = ""


class Constraint(NamedTuple):
    """A grammar for the whole answer: `kind` is a field of the contract's Constraint, `text` what
    stands in it (of choices their JSON list), `param` what the caller calls it. `reasoning` may
    stand in front of the answer. `may_call`: calls in the model's own format may stand in the
    answer's place. `tools` are the names of those whose calls it was made of, if it was."""

    kind: str
    text: str
    param: str
    reasoning: Reasoning | None = None
    may_call: bool = False
    tools: tuple[str, ...] = ()

    @classmethod
    def read(cls, kind: str, value: Any, param: str) -> Constraint:
        """Raises InvalidRequest for a value of the wrong type; what it says is the engine's."""
        if kind == "choice":
            is_right = isinstance(value, list | tuple) and bool(value)
            is_right = is_right and all(isinstance(one, str) for one in value)
            wording = "a list of one text or more"
        elif kind in ("json_schema", "structural_tag"):
            is_right, wording = isinstance(value, str | Mapping), "an object, or its JSON"
        else:
            is_right, wording = isinstance(value, str), "a text"
        if not is_right:
            raise InvalidRequest(f"{param} must be {wording}", param=param)
        if isinstance(value, str):
            if kind in ("json_schema", "structural_tag"):
                check_nesting(value, param)
            return cls(kind, value, param)
        try:
            return cls(kind, json.dumps(value, allow_nan=False), param)
        except (TypeError, ValueError, RecursionError) as failure:
            raise InvalidRequest(f"{param} is not JSON: {failure}", param=param) from failure

    @property
    def message(self) -> dict[str, Any]:
        """Fields of the contract's Constraint."""
        if self.kind == "choice":
            return {"choice": {"values": json.loads(self.text)}}
        return {self.kind: True if self.kind == "json_object" else self.text}


def constraint_of(asked: StructuredOutputsParams | None) -> Constraint | None:
    """Raises InvalidRequest unless one field is given, and of the right type."""
    if asked is None:
        return None
    names = [one.name for one in fields(asked)]
    given = [name for name in names if getattr(asked, name) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs has {', '.join(given) or 'nothing'}; give exactly one of "
            f"{', '.join(names)}",
            param="structured_outputs",
        )
    (name,) = given
    param = f"structured_outputs.{name}"
    if name == "json_object":
        if asked.json_object is not True:  # a schema, in the place of `json`
            raise InvalidRequest(
                f"{param} is {reprlib.repr(asked.json_object)}; it must be True, or left out: a "
                "schema is given as json",
                param=param,
            )
        return Constraint("json_object", "", param)
    return Constraint.read(_KINDS[name], getattr(asked, name), param)
