"""The page at `/` as a browser gets it: headers, types, caching, and what it asks the server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.service.fake_engine import serving
from tests.service.frontends import frontend_for, make_engine, stack, write_tokenizer
from tests.waiting import PATIENCE_S, http_client

TYPES = {
    "/": "text/html; charset=utf-8",
    "/ui/app.js": "text/javascript; charset=utf-8",
    "/ui/canvas.js": "text/javascript; charset=utf-8",
    "/ui/key.js": "text/javascript; charset=utf-8",
    "/ui/sse.js": "text/javascript; charset=utf-8",
    "/ui/style.css": "text/css; charset=utf-8",
    "/ui/icon.svg": "image/svg+xml",
}
WEB = Path(__file__).parents[2] / "frontend" / "web"


async def test_every_file_is_served_and_nothing_else_may_run(tmp_path: Path) -> None:
    assert {Path(path).name for path in TYPES if path != "/"} | {"index.html"} == {
        path.name for path in WEB.iterdir()
    }
    async with stack(tmp_path) as served, served.http() as client:
        for path, kind in TYPES.items():
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            head = await client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(answer.content))
            known = {"if-none-match": answer.headers["etag"]}
            again = await client.get(path, headers=known)
            assert (again.status_code, again.content) == (304, b"")
            other = await client.get(path, headers={"if-none-match": '"else"'})
            assert other.content == answer.content


def test_the_files_name_no_other_place() -> None:
    """No address but our own paths, no inline script and no inline style."""
    namespace = "http://www.w3.org/2000/svg"
    for path in WEB.iterdir():
        text = path.read_text().replace(namespace, "")
        assert not re.search(r"https?:|(?<![:/])//\w|innerHTML|insertAdjacent|eval\(", text), path
    html = (WEB / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<script>|<style", html)
    linked = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert set(linked) <= TYPES.keys()
    # Every control has a name that a screen reader can tell.
    for field in re.findall(r"<(?:input|textarea)[^>]*>", html):
        name = re.search(r'id="(\w+)"', field)
        labelled = name is not None and f'for="{name[1]}"' in html
        assert labelled or re.search(
            rf"<label[^>]*>(?:(?!</label>).)*{re.escape(field)}", html, re.S
        )


@pytest.mark.parametrize(
    "path", ["/ui/../app.py", "/ui/%2e%2e%2fapp.py", "/ui/nothing.js", "/ui/", "/ui/web/app.js"]
)
async def test_no_other_file_is_served(tmp_path: Path, path: str) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        answer = await client.get(path)
        assert answer.status_code == 404
        assert "no route" in answer.json()["error"]["message"]


async def test_the_page_is_no_part_of_the_api(tmp_path: Path) -> None:
    async with stack(tmp_path) as served, served.http() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert "/v1/completions" in paths
        assert not [path for path in paths if path == "/" or path.startswith("/ui")]
        answer = await client.post("/")
        assert answer.status_code == 405


async def test_model_and_pieces(tmp_path: Path) -> None:
    async with (
        stack(tmp_path, engine={"mask_token_id": 264}) as served,
        served.http() as client,
    ):
        facts = (await client.get("/ui/model")).json()
        assert facts == {"has_chat_template": True, "block_length": 4, "mask_token_id": 264}
        ids = [served.tokenizer.token_to_id(name) for name in ("hell", "<|mask|>")]
        answer = await client.get("/ui/pieces", params={"ids": f"{ids[0]},10,{ids[1]}"})
        assert answer.json() == {"pieces": ["hell", "\n", "<|mask|>"]}
        listed = ",".join(["1"] * 513)
        for wrong in ("", "a", "1,", "1,,2", "-1", "\u0661", "9" * 5000, listed):
            answer = await client.get("/ui/pieces", params={"ids": wrong})
            assert answer.status_code == 400, wrong
            assert answer.json()["error"]["param"] == "ids"
        answer = await client.get("/ui/pieces", params={"ids": "100000"})
        assert answer.json()["error"]["code"] == "token_id_out_of_range"


async def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    fake, _ = make_engine(tmp_path)
    write_tokenizer(tmp_path / "tokenizer", template=None)
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}")
    for flags, has in (({}, False), ({"chat_template": str(own)}, True)):
        async with serving(fake) as port, frontend_for(port, **flags) as frontend:
            assert await frontend.desk.fleet.wait_ready(PATIENCE_S)
            url = f"http://127.0.0.1:{frontend.http_port}"
            async with http_client(url) as client:
                assert (await client.get("/ui/model")).json()["has_chat_template"] is has


async def test_the_page_is_there_before_the_engine(tmp_path: Path) -> None:
    async with frontend_for(1) as frontend:
        url = f"http://127.0.0.1:{frontend.http_port}"
        async with http_client(url) as client:
            assert (await client.get("/")).status_code == 200
            for path in ("/ui/model", "/ui/pieces?ids=1"):
                assert (await client.get(path)).status_code == 503
