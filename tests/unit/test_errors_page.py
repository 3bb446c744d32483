"""docs/errors.md names every code of an error, and of those of requests the status."""

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
FOLDERS = ("frontend", "engine_service", "tidemill")
OF_BATCHES = ROOT / "tidemill" / "commands" / "batch_requests.py"


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
    given = codes_of(*FOLDERS) | defaults()
    assert {"QUEUE_FULL", "KV_PIECE", "ENGINE_DEAD", "OUT_OF_MEMORY", "KEYS_FILE"} <= given.keys()
    assert [code for code in given if not re.search(rf"\b{code}\b", PAGE)] == []


def test_every_code_of_lines_without_an_answer_is_named() -> None:
    text = OF_BATCHES.read_text()
    given = re.findall(r'_unanswered\(request, "(\w+)"|"code": "(\w+)"', text)
    codes = {(unanswered or other).upper() for unanswered, other in given}
    assert {"NO_CONNECTION", "NOT_JSON"} <= codes
    assert [code for code in codes if not re.search(rf"\b{code}\b", PAGE)] == []


def test_codes_of_requests_have_the_statuses_of_their_errors() -> None:
    given, num_checked = codes_of(*FOLDERS) | defaults(), 0
    for row in ROWS:
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) != 5 or not re.match(r"[A-Z_]{6,}", cells[1]):
            continue
        for code in cells[1].split(", "):
            statuses = given.get(code, set())
            assert statuses <= {int(one) for one in cells[2].split(", ")}, (code, statuses)
            num_checked += code in given
    assert num_checked > 25
