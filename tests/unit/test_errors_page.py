"""docs/errors.md names every code that a request can be answered with, and its status."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tidemill.runtime import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
ROWS = PAGE[PAGE.index("## Codes of requests") : PAGE.index("## Codes of operators")].splitlines()
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.ServiceError)
}
SERVING = (
    "frontend",
    "engine_service/core",
    "engine_service/server",
    "engine_service/constraints",
    "engine_service/decoding",
    "engine_service/sampling",
    "tidemill/runtime",
)


def codes_of(*folders: str) -> dict[str, set[int]]:
    """Codes that are given where an error is made, with the HTTP statuses of the errors."""
    found: dict[str, set[int]] = defaultdict(set)
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    for call in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if not isinstance(call, ast.Call):
            continue
        kind = KINDS.get(getattr(call.func, "id", ""))
        for given in call.keywords:
            if given.arg == "reason" and isinstance(given.value, ast.Constant):
                found[given.value.value] |= set() if kind is None else {kind.http_status}
    return found


def defaults() -> dict[str, set[int]]:
    """Those of the classes."""
    return {kind.default_reason: {kind.http_status} for kind in KINDS.values()}


def test_every_code_is_named() -> None:
    given = codes_of(*SERVING) | defaults()
    assert {"QUEUE_FULL", "GENERATION_DEAD_END", "KV_PIECE", "ENGINE_DEAD"} <= given.keys()
    assert [code for code in given if not re.search(rf"\b{code}\b", PAGE)] == []


def test_codes_of_requests_have_the_statuses_of_their_errors() -> None:
    given, num_checked = codes_of("frontend", "engine_service", "tidemill") | defaults(), 0
    for row in ROWS:
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) != 5 or not re.match(r"[A-Z_]{6,}", cells[1]):
            continue
        for code in cells[1].split(", "):
            statuses = given.get(code, set())
            assert statuses <= {int(one) for one in cells[2].split(", ")}, (code, statuses)
            num_checked += code in given
    assert num_checked > 25
