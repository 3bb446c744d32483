"""The lines of OpenAI's batch files: which requests are asked, which are answered already.

It does not know HTTP.
"""

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from tidemill.runtime.errors import FailedPrecondition, InvalidRequest

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
"""Routes that answer with what was computed, in one object."""
_ID_PREFIX = "batch_req_"
_HEAD = b'{"id": "' + _ID_PREFIX.encode()
"""How every line starts that we write."""


class Request(NamedTuple):
    """A line that can be asked; `content` is the body of the HTTP request, JSON in UTF-8."""

    number: int
    custom_id: str
    url: str
    content: bytes


class Refused(NamedTuple):
    """A line that cannot be asked. Without a custom_id no line of the output can stand for it."""

    number: int
    custom_id: str | None
    error: InvalidRequest


def read_requests(path: Path) -> Iterator[Request | Refused]:
    """The lines of `path` that are not blank, in their order; the first is number 1.

    The first line with a custom_id owns it, whatever else is wrong with that line.
    """
    taken: set[str] = set()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _read(number, line, taken)


def _read(number: int, line: bytes, taken: set[str]) -> Request | Refused:
    custom_id = None
    try:
        fields = _parsed(line)
        custom_id = _custom_id(fields)
        if custom_id in taken:
            raise InvalidRequest(
                f"line {number} has the custom_id of an earlier line; each needs its own",
                reason="DUPLICATE_CUSTOM_ID",
                param="custom_id",
            )
        taken.add(custom_id)
        return Request(number, custom_id, _url(fields), _content(fields))
    except InvalidRequest as error:
        return Refused(number, custom_id, error)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as failure:
        raise InvalidRequest(f"not JSON: {failure}", reason="INVALID_JSON") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("not a JSON object", reason="INVALID_JSON")
    return fields


def _refuse_constant(name: str) -> None:
    """Python reads and writes NaN and Infinity; JSON knows neither."""
    raise ValueError(f"{name} is not a number in JSON")


def _custom_id(fields: Mapping[str, Any]) -> str:
    found = fields.get("custom_id")
    if not isinstance(found, str) or not found:
        raise InvalidRequest(
            "custom_id must be a string that is not empty",
            reason="MISSING_CUSTOM_ID",
            param="custom_id",
        )
    return found


def _url(fields: Mapping[str, Any]) -> str:
    if fields.get("method") != "POST":
        raise InvalidRequest(
            f"method is {_shown(fields.get('method'))}; it must be POST",
            reason="INVALID_METHOD",
            param="method",
        )
    url = fields.get("url")
    if url not in URLS:
        raise InvalidRequest(
            f"url is {_shown(url)}; it must be one of {', '.join(URLS)}",
            reason="INVALID_URL",
            param="url",
        )
    return str(url)


def _content(fields: Mapping[str, Any]) -> bytes:
    body = fields.get("body")
    if not isinstance(body, dict):
        raise InvalidRequest(
            f"body is {_shown(body)}; it must be an object", reason="INVALID_BODY", param="body"
        )
    for name, why in (
        ("stream", "a line of the output holds a whole answer"),
        ("background", "the answer would come before its text"),
    ):
        if body.get(name) is True:
            raise InvalidRequest(
                f"{name} is true; leave it out: {why}", reason="INVALID_BODY", param=f"body.{name}"
            )
    try:
        return json.dumps(body, allow_nan=False).encode()
    except ValueError:  # 1e999 is read as infinity
        raise InvalidRequest(
            "body has a number that is too large", reason="INVALID_BODY", param="body"
        ) from None


def _shown(value: object) -> str:
    return repr(value)[:80]


def refused_line(refused: Refused) -> dict[str, Any]:
    """The line of the output for a request that was not asked."""
    error = refused.error
    return output_line(
        refused.custom_id,
        None,
        {
            "code": error.reason.lower(),
            "message": error.message,
            "param": error.param,
            "line": refused.number,
        },
    )


def output_line(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> dict[str, Any]:
    """A line of the output; `error` is what went wrong outside of HTTP."""
    name = f"{_ID_PREFIX}{uuid.uuid4().hex}"
    return {"id": name, "custom_id": custom_id, "response": response, "error": error}


class Answers:
    """The output file, locked: what earlier runs answered, and one line per answer of this run.

    Opening it drops what is to be asked again: failures of requests in `asked`, and the half of a
    line that a killed run left at the end. All other lines stay as they are. Raises InvalidRequest
    where the file cannot be written, FailedPrecondition where it is another run's or something else
    than answers.
    """

    def __init__(self, path: Path, asked: Collection[str]) -> None:
        self._path = path.resolve()
        if self._path.exists() and not self._path.is_file():
            raise InvalidRequest(
                f"{path} is not a file; answers go to one, to be found by the next run",
                param="output_file",
            )
        self.done: set[str] = set()
        try:
            self._file = _locked(self._path)
            if self._path.stat().st_size:
                self._file = self._repaired(asked)
        except OSError as failure:
            raise InvalidRequest(
                f"cannot write {path}: {failure.strerror}; choose another --output-file",
                param="output_file",
            ) from failure

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a line, which outlives this process from here on.

        Raises FailedPrecondition when it cannot be written.
        """
        left = memoryview(json.dumps(line).encode() + b"\n")
        before = os.fstat(self._file.fileno()).st_size
        try:
            while left:  # a disk that is nearly full takes a part first
                left = left[self._file.write(left) :]
        except OSError as failure:
            # Answers that have come by now are still written, if there is room again: behind half
            # of a line they would make one that no run can read.
            self._file.truncate(before)
            raise FailedPrecondition(
                f"cannot write {self._path}: {failure.strerror}; when it can be written again, "
                "the same command goes on"
            ) from failure

    def close(self) -> None:
        """Lets other runs have the file."""
        self._file.close()

    def _repaired(self, asked: Collection[str]) -> FileIO:
        """The file that takes the place of the old one, open and locked before it does."""
        fresh = self._path.with_name(f".{self._path.name}.resumed")
        with self._file:  # holds the lock until the other file is in place
            try:
                with self._path.open("rb") as old, fresh.open("wb") as kept:
                    for number, line in enumerate(old, 1):
                        if self._is_kept(number, line, asked):
                            kept.write(line.rstrip(b"\r\n") + b"\n")
                    kept.flush()
                    os.fsync(kept.fileno())  # a machine that dies keeps either file, whole
                shutil.copymode(self._path, fresh)
                opened = _locked(fresh)
                fresh.replace(self._path)
            finally:
                fresh.unlink(missing_ok=True)
        return opened

    def _is_kept(self, number: int, line: bytes, asked: Collection[str]) -> bool:
        if not line.strip():
            return False
        try:
            fields = json.loads(line)
            custom_id, response = fields["custom_id"], fields["response"]
            is_answer = response is not None and response["status_code"] == 200
            is_answer = is_answer and fields["error"] is None
            is_asked = custom_id in asked
        except (ValueError, TypeError, KeyError, RecursionError):
            is_ours = line.startswith(_HEAD) or _HEAD.startswith(line)
            if is_ours and not line.endswith(b"\n"):
                return False
            raise FailedPrecondition(
                f"line {number} of {self._path} is not an answer to a batch; nothing was changed; "
                "choose another --output-file"
            ) from None
        if is_answer:
            self.done.add(custom_id)
        return is_answer or not is_asked


def _locked(path: Path) -> FileIO:
    file = path.open("ab", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between our two steps a run that was just starting may have put another file there.
        is_held = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except BlockingIOError:
        is_held = False
    if not is_held:
        file.close()
        raise FailedPrecondition(f"another run writes {path}; wait for its end")
    return file
