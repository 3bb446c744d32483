"""`tidemill run-batch` as a user runs it: mixed files, a kill and a second run, absent servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.real_stack import HOST, ROOT, START_S, Stack, engine, frontend
from tests.waiting import PATIENCE_S, eventually, free_port

WORDS = ("harbour", "tide", "mill", "water", "wheel", "rope", "mast", "keel", "oar", "sail")

# A shell that starts tests in the background has them ignore Ctrl-C, and with them their children.
START = (
    "import signal, sys\n"
    "from tidemill.cli import main\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "sys.exit(main())\n"
)


def asked(custom_id: str, prompt: str, **changes: object) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "stop": "\n"}
    call = {"method": "POST", "url": "/v1/completions", "body": body}
    return {"custom_id": custom_id, **call, **changes}


def reversals() -> list[dict[str, Any]]:
    return [asked(word, f"reverse: {word} =") for word in WORDS]


class Run:
    """A running `tidemill run-batch` from in.jsonl to out.jsonl of a folder."""

    def __init__(self, folder: Path, url: str, *flags: str) -> None:
        self.out = folder / "out.jsonl"
        self._err = folder / "err"
        command = [sys.executable, "-c", START, "run-batch", "-i", "in.jsonl", "-o", "out.jsonl"]
        with self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, f"--url={url}", *flags],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                cwd=folder,
                stderr=err,
            )

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def num_lines(self) -> int:
        return self.out.read_bytes().count(b"\n") if self.out.exists() else 0

    def wait(self) -> int:
        return self.process.wait(START_S)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def texts(self) -> dict[str, str]:
        """What was answered to each custom_id, which stands there once."""
        lines = self.lines()
        found = {
            line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines
        }
        assert len(found) == len(lines), Counter(line["custom_id"] for line in lines)
        return found


@contextmanager
def batch(folder: Path, url: str, *flags: str) -> Iterator[Run]:
    run = Run(folder, url, *flags)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()


def completed(folder: Path, url: str, *flags: str) -> tuple[int, Run]:
    """The exit status of a whole run."""
    with batch(folder, url, *flags) as run:
        return run.wait(), run


def write(folder: Path, *lines: object) -> None:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "in.jsonl").write_text("".join(f"{text}\n" for text in texts))


class Gate:
    """A server in front of a stack: lets so many requests through and holds the others."""

    def __init__(self, stack: Stack, num_passing: int) -> None:
        self._passing = threading.Semaphore(num_passing)
        self.asked: list[str] = []
        self.is_open = threading.Event()
        gate = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                gate.asked.append(self.path)
                if not gate._passing.acquire(blocking=False):
                    gate.is_open.wait()
                    return
                answer = httpx.post(f"{stack.url}{self.path}", content=content, timeout=START_S)
                self.send_response(answer.status_code)
                self.send_header("content-length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self.url = f"http://{HOST}:{self._server.server_port}"

    def __enter__(self) -> Gate:
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_a_mixed_file(stack: Stack, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "reverse: harbour"}], "temperature": 0}
    write(
        tmp_path,
        asked("completion", "add: 1+2 ="),
        "{not JSON",
        asked("chat", "", url="/v1/chat/completions", body=chat),
        "",
        {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}},
        asked("response", "", url="/v1/responses", body={"input": "reverse: harbour"}),
        asked("message", "", url="/v1/messages", body={**chat, "max_tokens": 32, "model": "demo"}),
        asked("refused", "", body={"prompt": "a", "max_tokens": -1}),
        asked("completion", "a"),
        asked("streamed", "", body={"prompt": "a", "stream": True}),
        asked("wrong url", "a", url="/v1/audio/speech"),
        asked("wrong method", "a", method="GET"),
    )
    status, run = completed(tmp_path, stack.url, "--concurrency=3")
    assert status == 1
    lines = run.lines()
    assert all(line.keys() == {"id", "custom_id", "response", "error"} for line in lines)
    assert len({line["id"] for line in lines}) == len(lines) == 9
    codes = {(line["custom_id"], line["error"]["code"]) for line in lines if line["error"]}
    assert codes == {
        ("completion", "duplicate_custom_id"),
        ("streamed", "invalid_body"),
        ("wrong url", "invalid_url"),
        ("wrong method", "invalid_method"),
    }
    answers = {line["custom_id"]: line["response"] for line in lines if not line["error"]}
    assert {name: answer["status_code"] for name, answer in answers.items()} == {
        **dict.fromkeys(("completion", "chat", "response", "message"), 200),
        "refused": 400,
    }
    assert all(answer["request_id"] for answer in answers.values())
    bodies = {name: answer["body"] for name, answer in answers.items()}
    assert bodies["completion"]["choices"][0]["text"].strip() == "3"
    assert "ruobrah" in bodies["chat"]["choices"][0]["message"]["content"]
    assert bodies["response"]["output"][0]["type"] == "message"
    assert "ruobrah" in bodies["message"]["content"][0]["text"]
    assert bodies["refused"]["error"]["param"] == "max_tokens"
    assert "out.jsonl: 4 of 11 answered" in run.err
    assert "5 failed" in run.err
    assert "line 2 has no line in the output: not JSON" in run.err
    assert "line 5 has no line in the output: custom_id must be" in run.err


def test_killed_in_the_middle_and_run_again(stack: Stack, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        write(folder, *reversals())
    status, reference = completed(whole, stack.url)
    assert status == 0, reference.err
    texts = reference.texts()
    assert texts.keys() == set(WORDS)
    assert texts["harbour"].strip() == "ruobrah"

    with Gate(stack, num_passing=4) as gate, batch(cut, gate.url, "--concurrency=3") as run:
        eventually(lambda: run.num_lines == 4 and len(gate.asked) == 7, "nobody waits", START_S)
        run.process.send_signal(signal.SIGKILL)
        run.wait()
    assert run.num_lines == 4, "what was answered outlives the kill"
    before = run.out.read_bytes().splitlines(keepends=True)
    run.out.write_bytes(b"".join(before)[:-20])  # as if the last line had been half written

    status, run = completed(cut, stack.url)
    assert status == 0, run.err
    assert run.texts() == texts
    assert run.out.read_bytes().startswith(b"".join(before[:3])), "these were not asked again"
    assert "10 of 10 answered (3 before this run)" in run.err

    done = run.out.read_bytes()
    status, run = completed(cut, f"http://{HOST}:{free_port()}")
    assert (status, run.out.read_bytes()) == (0, done), "nothing is left to ask anybody"


def test_interrupted(stack: Stack, tmp_path: Path) -> None:
    write(tmp_path, *reversals())
    with Gate(stack, num_passing=2) as gate, batch(tmp_path, gate.url, "--concurrency=2") as run:
        eventually(lambda: run.num_lines == 2 and len(gate.asked) == 4, "nobody waits", START_S)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
    assert "2 of 10 answered" in run.err
    assert "8 were not finished; the same command goes on with them" in run.err
    assert "Traceback" not in run.err
    status, run = completed(tmp_path, stack.url)
    assert (status, run.texts().keys()) == (0, set(WORDS))


def test_waits_for_a_server_that_is_away_but_not_for_ever(tmp_path: Path) -> None:
    write(tmp_path, *reversals())
    port, http_port = free_port(), free_port()
    nobody = f"http://{HOST}:{http_port}"
    status, run = completed(tmp_path, nobody, "--max-retries=1")
    assert status == 1
    assert {line["error"]["code"] for line in run.lines()} == {"no_connection"}
    assert sorted(line["custom_id"] for line in run.lines()) == sorted(WORDS)
    assert f"{nobody}: no_connection; trying again" in run.err

    with frontend(tmp_path, port, "--connect-timeout-s=600") as stack:
        status, run = completed(tmp_path, stack.url, "--max-retries=1", "--concurrency=4")
        assert status == 1
        assert Counter(line["response"]["status_code"] for line in run.lines()) == {503: 10}
        assert sorted(line["custom_id"] for line in run.lines()) == sorted(WORDS)
        assert "10 failed (10 HTTP 503); the same command asks them again" in run.err

        with batch(tmp_path, stack.url, "--max-retries=1000") as run:
            eventually(lambda: "HTTP 503; trying again" in run.err, "it does not wait", PATIENCE_S)
            assert run.num_lines == 0, "the failures of the run before are gone"
            with engine(tmp_path, port, "demo"):
                assert run.wait() == 0, run.err
        assert run.texts().keys() == set(WORDS)
