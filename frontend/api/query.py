"""What stands behind the question mark of a GET: read, checked and documented as bodies are."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from frontend.api.responses_schema import Includes
from frontend.api.wrong_fields import invalid


class Query(BaseModel):
    """The parameters of one route. Ones that it does not name are ignored."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)
    lists: ClassVar[frozenset[str]] = frozenset()
    """Those that may be given several times, with [] behind their name or without."""


class ModelsQuery(Query):
    """GET /v1/models: pages, as Anthropic's clients ask for them."""

    limit: int = Field(default=20, ge=1, le=1000)
    after_id: str | None = None
    """The page begins behind this model."""
    before_id: str | None = None
    """The page ends in front of this model."""


class ResponseQuery(Query):
    """GET /v1/responses/ID."""

    lists = frozenset(("include",))

    stream: bool = False
    """The events of a response in the background, those to come included."""
    starting_after: int | None = Field(default=None, ge=0, lt=10**9)
    """Only events behind this sequence_number."""
    include: Includes | None = None
    """Without effect: a response is told with what was asked for when it was made."""
    include_obfuscation: Literal["false"] = "false"


class InputItemsQuery(Query):
    """GET /v1/responses/ID/input_items."""

    lists = frozenset(("include",))

    limit: int = Field(default=20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    """The page begins behind the item with this id."""
    include: Includes | None = None
    """Without effect: items are told as they are kept."""


Asked = TypeVar("Asked", bound=Query)


def read_query(request: Request, kind: type[Asked]) -> Asked:
    """The query of a request. Raises InvalidRequest naming the parameter."""
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        plain = name.removesuffix("[]")
        if plain in kind.lists:
            given.setdefault(plain, []).append(value)
        else:
            given[name] = value
    try:
        return kind.model_validate(given)
    except ValidationError as failure:
        raise invalid(failure, given) from failure


def documented_query(kind: type[Query]) -> dict[str, Any]:
    """The parameters for the OpenAPI document."""
    parameters = []
    for name, schema in kind.model_json_schema()["properties"].items():
        text = {"description": schema.pop("description")} if "description" in schema else {}
        place = {"name": name, "in": "query", "required": False}
        parameters.append({**place, **text, "schema": schema})
    return {"parameters": parameters}
