"""Whatever is sent to a route, it answers with a result or says what is wrong: no 5xx, no hang.

Bodies are drawn from the server's own OpenAPI document: one that is served, with some fields drawn
anew from their schemas or replaced by something that no schema foresees.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.e2e.real_stack import Faces

NUM_BODIES, MOST_BODIES = 30, 300
"""For each route: those that are always sent, and how many until one is refused."""
HI = [{"role": "user", "content": "hi"}]
FEW = {"max_tokens": 3}
PAIR = {"text_1": "a", "text_2": ["b", "c"]}
DOCUMENTS = {"query": "a", "documents": ["b", "c"]}
SERVED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, **FEW},
    "/v1/completions": {"prompt": "a", **FEW},
    "/v1/messages": {"model": "demo", "messages": HI, **FEW},
    "/v1/messages/count_tokens": {"model": "demo", "messages": HI},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/generate": {"prompt": "a", "gen_length": 3},
    "/v1/generate_batch": {"prompts": ["a", "b"], "gen_length": 3},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/rerank": DOCUMENTS,
    "/rerank": DOCUMENTS,
    "/v2/rerank": DOCUMENTS,
    "/v1/score": PAIR,
    "/score": PAIR,
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [3, 4]},
}
REFUSED = {"/classify": {"input": "a"}, "/v1/classify": {"input": "a"}}
"""What the model of the stack does not do."""
JUNK: list[Any] = [
    None, 0, -1, 2**31, 2**63, 1e308, -0.5, "", "a", "x" * 5000, "\x00", "é🙂", "\ud800", [], {},
    [[]], [None], [-1], [2**40], {"a": 1}, {"type": "x"}, True, False, ["a", {"b": []}],
]  # fmt: skip
REFUSALS = {400, 404}
BUGS = ('"internal_error"', '"api_error"')
"""What OpenAI's and Anthropic's routes call a fault of ours."""
VALUES: dict[str, list[Any]] = {
    "integer": [0, 1, 2, 5, -1, 2**40],
    "number": [0.0, 0.5, 1.0, 2.5, -1.5],
    "boolean": [True, False],
    "string": ["a", "user", "demo", "auto", "function", "x y", "{}", "^a+$"],
    "null": [None],
}


class Drawer:
    """Values of the document's schemas, some of them spoilt."""

    def __init__(self, document: Any, rng: random.Random) -> None:
        self.parts = document["components"]["schemas"]
        self.rng = rng

    def value(self, schema: Any, depth: int = 0) -> Any:
        rng = self.rng
        if "$ref" in schema:
            schema = self.parts[schema["$ref"].rsplit("/", 1)[1]]
        if rng.random() < 0.15 or depth > 6:
            return rng.choice(JUNK)
        if "anyOf" in schema:
            return self.value(rng.choice(schema["anyOf"]), depth + 1)
        if "const" in schema or "enum" in schema:
            return schema.get("const", rng.choice(schema.get("enum", [None])))
        kind = schema.get("type")
        if kind == "array":
            items = schema.get("items", {})
            return [self.value(items, depth + 1) for _ in range(rng.randrange(3))]
        if kind == "object":
            wanted, fields = schema.get("required", []), schema.get("properties", {})
            taken = [name for name in fields if name in wanted or rng.random() < 0.2]
            return {name: self.value(fields[name], depth + 1) for name in taken}
        return rng.choice(VALUES.get(kind, JUNK))

    def body(self, schema: Any, served: dict[str, Any]) -> dict[str, Any]:
        """A body that is served, with one to three of its fields drawn anew."""
        fields = schema["properties"]
        names = self.rng.sample(list(fields), min(len(fields), self.rng.randint(1, 3)))
        return {**served, **{name: self.value(fields[name]) for name in names}}


def schema_of(document: Any, path: str) -> Any:
    body = document["paths"][path]["post"]["requestBody"]
    return body["content"]["application/json"]["schema"]


def is_sound(status: int, text: str) -> bool:
    """Served, or refused in words; what is streamed may fail in its events."""
    return 200 <= status < 500 and not any(kind in text for kind in BUGS)


async def test_every_route_is_drawn_for(faces: Faces) -> None:
    paths = (await faces.http.get("/openapi.json")).json()["paths"]
    assert {path for path, one in paths.items() if "post" in one and "{" not in path} == {
        *SERVED, *REFUSED, "/ping"
    }, "what else reads no body?"  # fmt: skip
    for path, body in SERVED.items():
        answer = await faces.http.post(path, json=body)
        assert answer.status_code in (200, 202), (path, answer.text)
    for path, body in REFUSED.items():
        assert (await faces.http.post(path, json=body)).status_code == 400


@pytest.mark.parametrize("path", [*SERVED, *REFUSED])
async def test_no_body_is_too_strange(faces: Faces, path: str, seed: int) -> None:
    document = (await faces.http.get("/openapi.json")).json()
    drawer = Drawer(document, random.Random(seed))
    statuses = set[int]()
    for number in range(MOST_BODIES):
        if number >= NUM_BODIES and statuses & REFUSALS:
            break
        body = drawer.body(schema_of(document, path), (SERVED | REFUSED)[path])
        content = json.dumps(body)
        headers = {"content-type": "application/json"}
        answer = await faces.http.post(path, content=content, headers=headers)
        assert is_sound(answer.status_code, answer.text), (content, answer.text)
        statuses.add(answer.status_code)
    assert statuses & REFUSALS, "nothing was refused"


def test_control_what_is_not_sound() -> None:
    assert is_sound(400, '{"error": {"type": "invalid_request_error"}}')
    assert not is_sound(500, "")
    assert not is_sound(200, 'data: {"error": {"type": "internal_error"}}')
