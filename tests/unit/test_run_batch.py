"""Batch files: what a line may say, what a second run keeps, and what the command refuses."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tidemill import cli
from tidemill.commands.batch_lines import (
    URLS,
    Answers,
    Refused,
    Request,
    output_line,
    read_requests,
    refused_line,
)
from tidemill.runtime.errors import FailedPrecondition

BODY = {"prompt": "add: 1+2 ="}


def asked(custom_id: object = "a", **changes: object) -> dict[str, Any]:
    call = {"method": "POST", "url": "/v1/completions", "body": BODY}
    return {"custom_id": custom_id, **call, **changes}


def answered(custom_id: str, status: int = 200) -> dict[str, Any]:
    return output_line(custom_id, {"status_code": status, "request_id": "r", "body": {}}, None)


def write(path: Path, *lines: object) -> Path:
    """Objects as JSON, text and bytes as they are."""
    texts = (line if isinstance(line, str | bytes) else json.dumps(line) for line in lines)
    path.write_bytes(b"".join(t if isinstance(t, bytes) else f"{t}\n".encode() for t in texts))
    return path


def custom_ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@pytest.fixture
def opened() -> Iterator[Callable[..., Answers]]:
    kept: list[Answers] = []

    def open_answers(path: Path, ids: set[str]) -> Answers:
        kept.append(Answers(path, ids))
        return kept[-1]

    yield open_answers
    for answers in kept:
        answers.close()


@pytest.mark.parametrize("url", URLS)
def test_a_good_line(url: str, tmp_path: Path) -> None:
    body = {"text": "é\u2028\ud800", "temperature": 0.1, "seed": 2**63, "stream": False}
    path = write(tmp_path / "in", "", asked("x", url=url, body=body, note=1), "  ")
    (line,) = read_requests(path)
    assert isinstance(line, Request)
    assert (line.number, line.custom_id, line.url) == (2, "x", url)
    assert json.loads(line.content) == body


def test_a_byte_order_mark_and_the_line_ends_of_windows(tmp_path: Path) -> None:
    path = write(tmp_path / "in", b"\xef\xbb\xbf" + json.dumps(asked()).encode() + b"\r\n\r\n")
    assert [type(line) for line in read_requests(path)] == [Request]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "INVALID_JSON"),
        (b"\xff\n", "INVALID_JSON"),
        ("[1]", "INVALID_JSON"),
        pytest.param("[" * 200_000, "INVALID_JSON", id="deep"),
        ('{"custom_id": "a", "body": {"temperature": NaN}}', "INVALID_JSON"),
        ({"method": "POST"}, "MISSING_CUSTOM_ID"),
        (asked(""), "MISSING_CUSTOM_ID"),
        (asked(7), "MISSING_CUSTOM_ID"),
        (asked(["a"]), "MISSING_CUSTOM_ID"),
    ],
)
def test_lines_without_a_name(line: object, reason: str, tmp_path: Path) -> None:
    (refused, good) = read_requests(write(tmp_path / "in", line, asked()))
    assert isinstance(refused, Refused)
    assert (refused.number, refused.custom_id, refused.error.reason) == (1, None, reason)
    assert isinstance(good, Request), "the others go on"


@pytest.mark.parametrize(
    ("line", "reason", "param"),
    [
        (asked(method="GET"), "INVALID_METHOD", "method"),
        ({"custom_id": "a", "url": URLS[0], "body": {}}, "INVALID_METHOD", "method"),
        (asked(url="/v1/images"), "INVALID_URL", "url"),
        (asked(url=["/v1/completions"]), "INVALID_URL", "url"),
        (asked(url="http://127.0.0.1/v1/completions"), "INVALID_URL", "url"),
        (asked(body="add"), "INVALID_BODY", "body"),
        (asked(body=None), "INVALID_BODY", "body"),
        (asked(body={"stream": True}), "INVALID_BODY", "body.stream"),
        (asked(body={"background": True}), "INVALID_BODY", "body.background"),
        (json.dumps(asked(body=[8])).replace("[8]", '{"x": 1e999}'), "INVALID_BODY", "body"),
    ],
)
def test_lines_with_a_name(line: object, reason: str, param: str, tmp_path: Path) -> None:
    (refused,) = read_requests(write(tmp_path / "in", line))
    assert isinstance(refused, Refused)
    written = refused_line(refused)
    assert written["custom_id"] == "a"
    assert written["response"] is None
    assert written["error"] == {
        "code": reason.lower(),
        "message": refused.error.message,
        "param": param,
        "line": 1,
    }


def test_the_first_line_owns_a_custom_id(tmp_path: Path) -> None:
    path = write(tmp_path / "in", asked("a"), asked("b", url="?"), asked("a"), asked("b"))
    kinds = [(line.custom_id, getattr(line, "error", None)) for line in read_requests(path)]
    reasons = [(name, error and error.reason) for name, error in kinds]
    assert reasons == [
        *(("a", None), ("b", "INVALID_URL")),
        *(("a", "DUPLICATE_CUSTOM_ID"), ("b", "DUPLICATE_CUSTOM_ID")),
    ]


def test_a_line_is_in_the_file_when_it_is_written(
    tmp_path: Path, opened: Callable[..., Answers]
) -> None:
    path = tmp_path / "out"
    answers = opened(path, {"a"})
    answers.write(answered("a"))
    assert custom_ids(path) == ["a"]


@pytest.mark.parametrize("is_whole", [False, True])
def test_every_place_where_a_kill_can_cut(
    is_whole: bool, tmp_path: Path, opened: Callable[..., Answers]
) -> None:
    """All of a line but its end of line is a whole answer; anything shorter is asked again."""
    first, last = (json.dumps(answered(name)).encode() for name in "ab")
    cuts = [len(last)] if is_whole else range(len(last))
    for cut in cuts:
        path = write(tmp_path / "out", first + b"\n" + last[:cut])
        answers = opened(path, {"a", "b", "c"})
        assert answers.done == ({"a", "b"} if is_whole else {"a"}), cut
        answers.write(answered("c"))
        answers.close()
        assert custom_ids(path) == (["a", "b", "c"] if is_whole else ["a", "c"]), cut
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failures_are_asked_again_and_other_lines_are_kept(
    tmp_path: Path, opened: Callable[..., Answers]
) -> None:
    kept = [answered("a"), answered("of another batch", 400)]
    not_json = {**answered("d"), "error": {"code": "not_json"}}
    failed = [answered("b", 503), output_line("c", None, {"code": "timeout"}), not_json]
    path = write(tmp_path / "out", kept[0], *failed, "", kept[1])
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    answers = opened(link, {"a", "b", "c", "d"})
    assert answers.done == {"a"}
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()


@pytest.mark.parametrize(
    "content",
    [
        b"notes of mine",
        b'{"a": 1}\n',
        json.dumps(asked()).encode() + b"\n",
        json.dumps(answered("a")).encode()[:40] + b"\n" + json.dumps(answered("b")).encode(),
        b'{"id": "batch_req_1", "custom_id": ["a"], "response": null, "error": null}\n',
    ],
)
def test_a_file_of_something_else_is_left_alone(
    content: bytes, tmp_path: Path, opened: Callable[..., Answers]
) -> None:
    path = write(tmp_path / "out", content)
    with pytest.raises(FailedPrecondition, match=r"line 1 of .* is not an answer"):
        opened(path, {"a"})
    assert path.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    write(path, answered("a"))
    assert opened(path, {"a"}).done == {"a"}, "its lock is gone"


@pytest.mark.parametrize("is_resumed", [False, True])
def test_two_runs_do_not_share_a_file(
    is_resumed: bool, tmp_path: Path, opened: Callable[..., Answers]
) -> None:
    path = tmp_path / "out"
    if is_resumed:
        write(path, answered("a"))
    first = opened(path, {"a", "b"})
    with pytest.raises(FailedPrecondition, match="another run writes"):
        opened(path, {"a", "b"})
    first.write(answered("b"))
    first.close()
    assert "b" in opened(path, {"a", "b"}).done


def test_what_is_kept_is_on_the_disk_before_it_takes_the_place_of_the_old_file(
    tmp_path: Path, opened: Callable[..., Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that died behind the exchange lost all answers."""
    path = write(tmp_path / "out", answered("a"), answered("b", 500))
    fsync, sizes = os.fsync, []

    def synced(file: int) -> None:
        sizes.append((os.fstat(file).st_ino, os.fstat(file).st_size))
        fsync(file)

    monkeypatch.setattr(os, "fsync", synced)
    opened(path, {"a", "b"})
    assert custom_ids(path) == ["a"]
    assert (path.stat().st_ino, path.stat().st_size) in sizes


def test_a_full_disk(tmp_path: Path, opened: Callable[..., Answers]) -> None:
    path = write(tmp_path / "out", answered("a"))
    answers = opened(path, {"a", "b"})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, limits[1]))
    try:
        with pytest.raises(FailedPrecondition, match="the same command goes on"):
            answers.write(answered("b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert custom_ids(path) == ["a"], "half of a line is there"
    answers.write(answered("c"))  # of another request, before the run has ended
    answers.close()
    assert opened(path, {"a", "b", "c"}).done == {"a", "c"}


def test_help_imports_neither_torch_nor_httpx() -> None:
    code = (
        "import sys\nfrom tidemill.cli import main\ntry:\n    main(['run-batch', '--help'])\n"
        "finally:\n    print({'torch', 'httpx', 'grpc'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: tidemill run-batch" in done.stdout
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--concurrency=0"], "--concurrency is 0; it must be at least 1"),
        (["--max-retries=-1"], "--max-retries is -1; it must be at least 0"),
        (["--timeout-s=0"], "--timeout-s is 0.0; it must be above 0"),
        (["--timeout-s=nan"], "--timeout-s is nan"),
        (["--url=h"], "--url is h; it must be an address"),
        (["--api-key=schl\u00fcssel"], "api_key: character 5 of 9 is not printable ASCII"),
        (["--api-key=abc\n"], "api_key: character 4 of 4 is not printable ASCII"),
        (["-i", "absent"], "cannot read absent: No such file"),
        (["-i", "."], r"\. is not a file; the input is read twice"),
        (["-o", "in"], "in is the input"),
        (["-o", "."], r"\. is not a file"),
        (["-o", "absent/out"], "cannot write absent/out: No such file"),
    ],
)
def test_refusals(
    flags: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = write(tmp_path / "in", asked()).read_bytes()
    assert cli.main(["run-batch", "-i", "in", "-o", "out", *flags]) == 1
    assert re.search(f"^tidemill run-batch: {words}", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert (tmp_path / "in").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SSL_CERT_FILE", "absent", "cannot read the certificates that SSL_CERT_FILE .* No such"),
        ("SSL_CERT_FILE", "in", "cannot read the certificates that SSL_CERT_FILE "),
        ("HTTP_PROXY", "foo://h", "cannot use the proxy that HTTP_PROXY, .* Unknown scheme"),
    ],
)
def test_variables_that_cannot_be_used(
    name: str,
    value: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    write(tmp_path / "in", asked())
    assert cli.main(["run-batch", "-i", "in", "-o", "out"]) == 1
    assert re.search(f"^tidemill run-batch: {words}", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
