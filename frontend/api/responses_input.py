"""What a response answers, as the items that clients may ask for again. It knows no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.api.responses_schema import InputItem
from tidemill.runtime.errors import InvalidRequest

Items = tuple[dict[str, Any], ...]
"""Items of a conversation, oldest first, each with an id and a type."""


def input_items(given: str | Sequence[InputItem], suffix: str) -> Items:
    """The items of `input`. Those that came without an id get one, which ends with `suffix`."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    return tuple(_item(one, f"{suffix}_in{number}") for number, one in enumerate(given))


def page(items: Items, *, limit: int, order: str, after: str | None) -> dict[str, Any]:
    """At most `limit` items in an `order` (asc, desc), those behind the id `after`. Raises
    InvalidRequest for an id that no item has."""
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"after is {after[:80]!r}; no item has that id", param="after")
        ordered = ordered[places[0] + 1 :]
    shown = ordered[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(ordered),
    }


def _item(given: InputItem, suffix: str) -> dict[str, Any]:
    """Texts alone are kept of contents: nothing else in them is served."""
    kind = given.type or "message"
    item = given.model_dump(exclude_none=True) | {"type": kind}
    item.setdefault("id", f"{kind}_{suffix}")
    if kind == "reasoning":
        return {**item, "summary": [], "content": _parts(given.content, "reasoning_text")}
    item.setdefault("status", "completed")
    if kind == "message":
        is_said = given.role == "assistant"
        item["content"] = _parts(given.content, "output_text" if is_said else "input_text")
    if isinstance(given.output, list):
        item["output"] = _parts(given.output, "input_text")
    return item


def _parts(content: str | list[dict[str, Any]] | None, kind: str) -> list[dict[str, Any]]:
    parts = [{"text": content}] if isinstance(content, str) else content or ()
    return [_part(part, kind) for part in parts]


def _part(given: dict[str, Any], kind: str) -> dict[str, Any]:
    if given.get("type") == "refusal":
        return {"type": "refusal", "refusal": given.get("refusal")}
    beside: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return {"type": kind, "text": str(given.get("text") or ""), **beside}
