"""What the Python clients share. Their environments have pytest and the client, nothing of ours."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

PATIENCE_S = 60.0


def fetched(path: str) -> str:
    """The body of a GET."""
    with urllib.request.urlopen(os.environ["TIDEMILL_URL"] + path, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def num_cancelled() -> int:
    """Requests whose clients went away before their answer was whole."""
    metrics = fetched("/metrics")
    assert "tidemill_num_requests_running" in metrics, metrics[:200]
    found = re.search(
        r'^tidemill_request_failure_total{error_type="cancelled".*} (\S+)', metrics, re.M
    )
    return int(float(found[1])) if found else 0


def num_requests() -> int:
    """Those that the frontend is working on."""
    return int(json.loads(fetched("/health"))["requests"])


def until(condition: Callable[[], bool], otherwise: str) -> None:
    """Waits for what the server does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


@contextmanager
def _abandoned() -> Iterator[None]:
    until(lambda: num_requests() == 0, "an earlier request does not end")
    before = num_cancelled()
    yield
    until(
        lambda: (num_cancelled(), num_requests()) == (before + 1, 0),
        "the server did not notice that its client left",
    )


@pytest.fixture
def url() -> str:
    """Where the server listens, without a path."""
    return os.environ["TIDEMILL_URL"]


@pytest.fixture
def abandoned() -> AbstractContextManager[None]:
    """A block in which the client leaves one request, which must end as one that nobody wants:
    not as finished, and with nothing left in the frontend."""
    return _abandoned()


@pytest.fixture
def busy() -> Callable[[], None]:
    """Returns once the server works on a request."""
    return lambda: until(lambda: num_requests() > 0, "no request came")


@pytest.fixture
def person() -> dict[str, Any]:
    """A schema of what `demo` answers to `json: tom 31 rome`."""
    properties = {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
