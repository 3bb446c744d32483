"""What an answer must be, in the words of OpenAI and of other servers, as one constraint.

It does not know grammars: whether one compiles is the engine's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frontend.api.openai_schema import GenerationBody
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.sampling_params import StructuredOutputsParams
from tidemill.structured import Constraint, constraint_of

_SPELLINGS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "grammar": "ebnf",
}
"""Fields of their own, with the kind of grammar that they hold: vLLM's older names, SGLang's and
llama.cpp's."""


def to_constraint(body: GenerationBody) -> Constraint | None:
    """The one grammar that a body asks for; None where it asks for none.

    Raises InvalidRequest for several, and Unsupported for forms that are not served.
    """
    found = [
        Constraint.read(kind, value, name)
        for name, kind in _SPELLINGS.items()
        if (value := getattr(body, name)) is not None
    ]
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        structured = constraint_of(StructuredOutputsParams(**given))
        found += [structured] if structured else []
    if body.response_format is not None:
        of_format = of_response_format(body.response_format, "response_format")
        found += [of_format] if of_format else []
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].param} and {found[1].param} both say what the answer must be; give one",
            param=found[1].param,
        )
    return found[0] if found else None


def of_response_format(given: Mapping[str, Any], param: str) -> Constraint | None:
    """OpenAI's response_format, and the text.format of responses, which has no inner object."""
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return Constraint("json_object", "", param)
        case "json_schema":
            outer = given.get("json_schema", given)
            schema = outer.get("schema") if isinstance(outer, Mapping) else None
            if not isinstance(schema, Mapping):
                raise InvalidRequest(f"{param}: json_schema needs an object `schema`", param=param)
            return Constraint.read("json_schema", schema, param)
        case "structural_tag" if "format" in given:
            raise Unsupported(
                f"{param}: structural tags are served in the form of structures and triggers, not "
                "with `format`",
                param=param,
            )
        case "structural_tag":
            tag = {name: given.get(name) for name in ("structures", "triggers")}
            return Constraint.read("structural_tag", tag, param)
    raise InvalidRequest(
        f"{param}.type must be text, json_object, json_schema or structural_tag", param=param
    )
