"""Downloads: only the files that are needed, progress in bytes, and each failure with a remedy.

A small HTTP server in this process stands in for the hub.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub import snapshot_download

from engine_service.config import EngineConfig
from engine_service.worker import hub
from engine_service.worker.checkpoint import fetch_checkpoint
from tests.waiting import PATIENCE_S
from tidemill.runtime.errors import InvalidRequest, NotFound, Unavailable

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b'{"added_tokens": []}',
    "model.safetensors": b"w" * 5000,
    "consolidated.safetensors": b"w" * 5000,
    "pytorch_model.bin": b"w" * 5000,
    "original/params.json": b"{}",
    "README.md": b"# text",
}
SMALL = {"config.json", "tokenizer.json"}


class FakeHub(BaseHTTPRequestHandler):
    """The three routes that a snapshot download asks for."""

    def do_HEAD(self) -> None:
        self.answer(send_body=False)

    def do_GET(self) -> None:
        self.answer(send_body=True)

    def answer(self, *, send_body: bool) -> None:
        path = self.path.split("?")[0].removeprefix("/api/models")
        if not path.startswith("/me/tiny"):
            gated = path.startswith("/me/gated")
            code = "GatedRepo" if gated else "RepoNotFound"
            return self.reply(403 if gated else 404, b"{}", {"X-Error-Code": code}, send_body)
        if "/nowhere" in path:
            return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, send_body)
        if "/tree/" in path:
            return self.reply(200, json.dumps(self.tree()).encode(), {}, send_body)
        if "/resolve/" not in path:
            body = {"id": "me/tiny", "sha": COMMIT, "siblings": []}
            return self.reply(200, json.dumps(body).encode(), {}, send_body)
        body = FILES[path.split(f"{COMMIT}/")[1]]
        etag = hashlib.sha1(body, usedforsecurity=False).hexdigest()
        return self.reply(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, send_body)

    @staticmethod
    def tree() -> list[dict[str, object]]:
        return [
            {
                "type": "file",
                "path": name,
                "size": len(body),
                "oid": hashlib.sha1(body, usedforsecurity=False).hexdigest(),
            }
            for name, body in FILES.items()
        ]

    def reply(self, status: int, body: bytes, headers: dict[str, str], send_body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if send_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent: pytest shows what fails."""


@contextmanager
def fake_hub() -> Iterator[str]:
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Online:
    """snapshot_download against the fake hub, with a cache of its own."""

    def __init__(self, endpoint: str, cache: Path) -> None:
        self.endpoint, self.cache = endpoint, cache

    def __call__(self, *args: object, **kwargs: object) -> object:
        return snapshot_download(*args, endpoint=self.endpoint, cache_dir=self.cache, **kwargs)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with fake_hub() as endpoint:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", Online(endpoint, tmp_path))
        yield


@pytest.mark.usefixtures("online")
def test_download_fetches_what_is_needed_and_reports_bytes() -> None:
    reports: list[tuple[str, int, int]] = []
    config = EngineConfig(model="me/tiny")
    found = fetch_checkpoint(config, lambda *report: reports.append(report))
    wanted = SMALL | {"model.safetensors"}
    assert {path.name for path in found.folder.iterdir()} == wanted
    assert (found.weight_version, found.model_id) == (COMMIT, "me/tiny")
    assert found.tokenizer_dir == str(found.folder)
    total = sum(len(FILES[name]) for name in wanted)
    assert reports[0] == ("download", 0, 0)
    assert reports[-1] == ("download", total, total)


@pytest.mark.usefixtures("online")
def test_dummy_weights_need_no_download_of_weights() -> None:
    config = EngineConfig(model="me/tiny", load_format="dummy")
    found = fetch_checkpoint(config, lambda *_: None)
    assert {path.name for path in found.folder.iterdir()} == SMALL


@pytest.mark.usefixtures("online")
def test_how_a_model_pools_comes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its modules' folders that file alone."""
    pooling = b'{"pooling_mode_cls_token": true}'
    monkeypatch.setitem(FILES, "modules.json", b"[]")
    monkeypatch.setitem(FILES, "1_Pooling/config.json", pooling)
    monkeypatch.setitem(FILES, "2_Dense/model.safetensors", b"w")
    found = fetch_checkpoint(EngineConfig(model="me/tiny"), lambda *_: None)
    assert found.weight_version == COMMIT
    assert (found.folder / "1_Pooling" / "config.json").read_bytes() == pooling
    top = {path.name for path in found.folder.iterdir()}
    assert top == SMALL | {"model.safetensors", "modules.json", "1_Pooling"}


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    ("model", "revision", "kind", "reason", "remedy"),
    [
        ("me/absent", None, NotFound, "MODEL_NOT_FOUND", "spelling, or set HF_TOKEN"),
        ("me/gated", None, InvalidRequest, "MODEL_GATED", "accept its terms"),
        ("me/tiny", "nowhere", NotFound, "REVISION_NOT_FOUND", "check --revision"),
    ],
)
def test_refusals_of_the_hub(
    model: str, revision: str | None, kind: type[Exception], reason: str, remedy: str
) -> None:
    with pytest.raises(kind, match=remedy) as caught:
        hub.download(model, revision, weights=True, report=lambda *_: None)
    assert caught.value.reason == reason
    assert model in caught.value.message


def test_offline_without_a_copy() -> None:
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE, or give a local folder") as caught:
        hub.download("me/never-seen", None, weights=True, report=lambda *_: None)
    assert caught.value.reason == "HUB_UNREACHABLE"


def test_a_full_disk_can_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(Unavailable, match=r"No space left.*resume") as caught:
        hub.download("me/tiny", None, weights=True, report=lambda *_: None)
    assert caught.value.reason == "DOWNLOAD_FAILED"


def test_impossible_names_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="not a valid hub id"):
        hub.download("me/--bad--", None, weights=True, report=lambda *_: None)


# ---------------------------------------------------------------- before anything starts

ASKED = """
import subprocess, sys
from tidemill.cli import main

def refuse(*_, **__):
    raise SystemExit("it starts")

subprocess.Popen = refuse
sys.exit(main(sys.argv[1:]))
"""


def start(model: str, endpoint: str, cache: Path, *, verb: str = "serve", **variables: str) -> str:
    """What stands on stderr of a start, which ends where the first process would be started."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", ASKED, verb, f"--model={model}", "--engine-port=0"],
        env=environ | variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize("verb", ["serve", "engine"])
def test_an_id_that_the_hub_does_not_know_starts_nothing(tmp_path: Path, verb: str) -> None:
    with fake_hub() as endpoint:
        said = start("me/absent", endpoint, tmp_path, verb=verb)
        words = "is not on the hub, or private: check the spelling, or set HF_TOKEN"
        assert said == f"tidemill {verb}: model 'me/absent' {words}\n"
        assert "at revision 'nowhere' does not exist: check --revision" in start(
            "me/tiny", endpoint, tmp_path, verb=verb, TIDEMILL_REVISION="nowhere"
        )
        assert "it starts" in start("me/tiny", endpoint, tmp_path, verb=verb)


def test_a_hub_that_cannot_be_asked_refuses_nothing(tmp_path: Path) -> None:
    with fake_hub() as endpoint:
        assert "it starts" in start("me/absent", endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert "it starts" in start("me/absent", endpoint, tmp_path)  # it is gone


def test_a_model_that_was_downloaded_is_not_asked_about(tmp_path: Path) -> None:
    """The hub may have lost it since: the copy serves."""
    kept = tmp_path / "hub" / "models--me--absent"
    (kept / "refs").mkdir(parents=True)
    (kept / "snapshots" / COMMIT).mkdir(parents=True)
    with fake_hub() as endpoint:
        (kept / "refs" / "main").write_text(COMMIT)
        assert "not on the hub" in start("me/absent", endpoint, tmp_path)
        (kept / "snapshots" / COMMIT / "config.json").write_text("{}")
        assert "it starts" in start("me/absent", endpoint, tmp_path)
