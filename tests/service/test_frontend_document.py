"""The OpenAPI document is whole: references find their parts, and bodies that are served fit it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from frontend.api.responses_schema import LOGPROBS
from tests.service.frontends import stack
from tidemill.nesting import MAX_DEPTH

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "tools": [TOOL], "stream_options": None},
    "/v1/completions": {"prompt": "a", "decoding": {"method": "x"}},
    "/v1/messages": {"model": "fake", "max_tokens": 3, "messages": HI},
    "/v1/responses": {"input": [{"role": "user", "content": "hi"}]},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}]},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64"},
}


def references(part: Any) -> set[str]:
    if isinstance(part, list):
        return set().union(*map(references, part))
    if not isinstance(part, dict):
        return set()
    own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
    return own.union(*map(references, part.values()))


def find(document: Any, reference: str) -> Any:
    assert reference.startswith("#/"), reference
    for name in reference[2:].split("/"):
        document = document[name]
    return document


def body_of(document: Any, path: str) -> Any:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    return {**content["application/json"]["schema"], "components": document["components"]}


@pytest.fixture
async def document(tmp_path: Path) -> Any:
    async with stack(tmp_path) as served, served.http() as client:
        await client.get("/openapi.json")
        return json.loads((await client.get("/openapi.json")).text)


async def test_every_reference_is_found(document: Any) -> None:
    found = references(document)
    assert any(name.endswith("ChatBody.ToolBody") for name in found)
    for reference in found:
        assert find(document, reference)
    assert "$defs" not in json.dumps(document)
    with pytest.raises(KeyError):
        find(document, "#/components/schemas/ToolBody")


async def test_what_fields_mean_is_told(document: Any) -> None:
    """Of bodies and of their parts; a field of which nothing is said has only a type."""
    chat = body_of(document, "/v1/chat/completions")["properties"]
    assert chat["top_k"]["description"] == "0 or -1 turns the filter off."
    assert "description" not in chat["temperature"]
    responses = body_of(document, "/v1/responses")["properties"]
    assert "starting_after" in responses["background"]["description"]
    options = document["components"]["schemas"]["ChatBody.StreamOptions"]["properties"]
    assert "usage" in options["include_usage"]["description"]


@pytest.mark.parametrize("path", BODIES)
async def test_bodies_that_are_served_fit_the_document(document: Any, path: str) -> None:
    schema = body_of(document, path)
    jsonschema.validate(BODIES[path], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**BODIES[path], "model": 3}, schema)


async def test_no_route_takes_a_body_that_is_nested_too_deeply(tmp_path: Path) -> None:
    """What is wide is no deeper for it, and the last level that is served is."""

    def body(num_levels: int) -> str:
        inner = num_levels - 1  # beside the object itself
        return '{"messages": 3, "x": ' + "[" * inner + "]" * inner + "}"

    async with stack(tmp_path) as served, served.http() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        posts = [path for path, one in paths.items() if "post" in one and "{" not in path]
        posts.remove("/ping")  # reads none
        assert len(posts) > 10
        for path in posts:
            for num_levels in (MAX_DEPTH + 1, 300, 900):
                answer = await client.post(path, content=body(num_levels))
                assert answer.status_code == 400, (path, answer.text)
                assert "inside of each other" in answer.text
        for fine in (body(MAX_DEPTH), '{"messages": 3, "x": ' + json.dumps([[1]] * 1000) + "}"):
            answer = await client.post("/v1/chat/completions", content=fine)
            assert answer.json()["error"]["param"] == "messages"
        parameters = json.loads('{"a": ' + "[" * 100 + "]" * 100 + "}")
        tool = {"type": "function", "name": "f", "parameters": parameters}
        asked = {"input": "a", "max_output_tokens": 2, "tools": [tool], "tool_choice": "none"}
        answer = await client.post("/v1/responses", json={**asked, "stream": True})
        assert "event: response.incomplete" in answer.text


QUERIES: dict[str, set[str]] = {
    "/v1/models": {"limit", "after_id", "before_id"},
    "/v1/responses/{name}": {"stream", "starting_after", "include", "include_obfuscation"},
    "/v1/responses/{name}/input_items": {"limit", "order", "after", "include"},
}


async def test_queries_are_documented(document: Any) -> None:
    for path, expected in QUERIES.items():
        given = document["paths"][path]["get"]["parameters"]
        found = {one["name"]: one for one in given if one["in"] == "query"}
        assert set(found) == expected
        assert not any(one["required"] for one in found.values())
        if "{name}" in path:
            assert any(one["in"] == "path" and one["required"] for one in given)
    limit = next(one for one in document["paths"]["/v1/models"]["get"]["parameters"])["schema"]
    assert (limit["minimum"], limit["maximum"]) == (1, 1000)


async def test_queries_are_checked(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        made = (await client.post("/v1/responses", json={"input": "a"})).json()
        name = made["id"]
        page = f"/v1/responses/{name}/input_items"
        for path, query in (
            ("/v1/models", {"limit": "0"}),
            ("/v1/models", {"limit": "x"}),
            ("/v1/models", {"after_id": "another"}),
            (f"/v1/responses/{name}", {"stream": "maybe"}),
            (f"/v1/responses/{name}", {"starting_after": "1"}),
            (f"/v1/responses/{name}", {"include_obfuscation": "true"}),
            (f"/v1/responses/{name}", {"include[]": "everything"}),
            (page, {"limit": "101"}),
            (page, {"order": "up"}),
            (page, {"after": "msg"}),
        ):
            answer = await client.get(path, params=query)
            ((param, _),) = query.items()
            assert answer.status_code == 400, (path, query)
            error = answer.json()["error"]
            assert error["param"].startswith(param.removesuffix("[]")), (path, query)
        for path, fine in (
            ("/v1/models", {"limit": "1", "unknown": "a"}),
            (f"/v1/responses/{name}", {"stream": "false", "include[]": LOGPROBS}),
            (page, {"limit": "1", "order": "asc", "include": LOGPROBS}),
        ):
            answer = await client.get(path, params=fine)
            assert answer.status_code == 200, (path, fine)
        assert answer.json()["data"][0]["content"][0]["text"] == "a"
        cards = (await client.get("/v1/models")).json()
        (card,) = cards["data"]
        behind = (await client.get("/v1/models", params={"after_id": card["id"]})).json()
        assert (cards["last_id"], behind["data"], behind["last_id"]) == (card["id"], [], None)


async def test_no_page_needs_anything_from_elsewhere(tmp_path: Path) -> None:
    """FastAPI's pages around the document would: without internet they stay empty."""
    async with stack(tmp_path) as served, served.http() as client:
        for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        document = (await client.get("/openapi.json")).json()
        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
    assert document["info"]["title"] == "Tidemill"
    assert "/v1/chat/completions" in document["paths"]
