"""Every gate holds for the repository, and fails on a small tree that breaks it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.arch import gates

ROOT = Path(__file__).parents[2]
Gate = Callable[[Path], list[str]]

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * gates.FUNCTION_LINES
UNDOCUMENTED = "class C:\n    x: int = 1\n    'Why.'\n    y: int = 2\n"
BREACHES: list[tuple[Gate, str, str]] = [
    (gates.long_files, "frontend/a.py", "x = 1\n" * (gates.FILE_LINES + 1)),
    (gates.long_files, "engine_service/kernels/a.py", "x = 1\n" * (gates.KERNEL_LINES + 1)),
    (gates.long_functions, "frontend/a.py", LONG_FUNCTION),
    (gates.long_inits, "frontend/__init__.py", "x = 1\n" * (gates.INIT_LINES + 1)),
    (gates.large_runtime, "tidemill/runtime/a.py", "x = 1\n" * (gates.RUNTIME_LINES + 1)),
    (gates.stray_stubs, "frontend/a.py", "from tidemill.v1 import engine_pb2\n"),
    (gates.stray_stubs, "engine_service/server/convert.py", "import tidemill.v1.text_pb2\n"),
    (gates.stray_stubs, "frontend/a.py", "from smg_grpc_proto.generated import common_pb2\n"),
    (gates.circular_imports, "frontend/a.py", "from frontend.a import b\n"),
    (gates.inner_imports, "frontend/a.py", "def f():\n    import json\n"),
    (gates.banned_words, "frontend/utils.py", "x = 1\n"),
    (gates.banned_words, "frontend/a.py", "def process_request(): ...\n"),
    (gates.banned_words, "frontend/a.py", "def f(info): ...\n"),
    (gates.banned_words, "frontend/a.py", "class TokenHelper: ...\n"),
    (gates.banned_words, "frontend/a.py", "data = 1\n"),
    (gates.swallowed_errors, "frontend/a.py", "try:\n    f()\nexcept Exception:\n    pass\n"),
    (gates.swallowed_errors, "frontend/a.py", "try:\n    f()\nexcept:\n    g()\n"),
    (gates.loose_ends, "frontend/a.py", "x = 1  # " + "TO" + "DO later\n"),
    (gates.loose_ends, "frontend/a.py", "def f():\n    global x\n    x = 1\n"),
    (gates.silent_modules, "frontend/a.py", "x = 1\n"),
    (gates.undocumented_fields, "frontend/config.py", UNDOCUMENTED),
    (gates.foreign_code, "frontend/a.py", "import pickle\n"),
    (gates.foreign_code, "engine_service/a.py", "x = torch.load(path)\n"),
    (gates.foreign_code, "engine_service/pipe.py", "f(trust_remote_code=True)\n"),
    (gates.foreign_places, "docs/a.md", "see " + "/" + "home/someone/notes\n"),
    (gates.foreign_places, "docs/a.md", "get it from files.python" + "hosted.org\n"),
]  # fmt: skip
GATES = list(dict.fromkeys(gate for gate, _, _ in BREACHES))


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
def test_repository_keeps_the_rule(gate: Gate) -> None:
    assert gate(ROOT) == []


@pytest.mark.parametrize(
    ("gate", "path", "text"), BREACHES, ids=lambda x: getattr(x, "__name__", "")
)
def test_gate_sees_a_breach(gate: Gate, path: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert len(gate(tmp_path)) == 1


def test_every_gate_has_a_breach() -> None:
    taking_root = {
        name
        for name, gate in vars(gates).items()
        if callable(gate)
        and not name.startswith("_")
        and getattr(gate, "__annotations__", {}) == {"root": Path, "return": list[str]}
    }
    assert taking_root == {gate.__name__ for gate in GATES}
