"""The contracts in proto/ are clean, and the generated stubs and docs are what they generate."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUBS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def drift(root: Path, scratch: Path) -> list[str]:
    """Stubs in tidemill/v1 and tidemill/oip that differ from what proto/ generates."""
    protos = sorted(
        path.relative_to(root).as_posix() for path in root.glob("proto/tidemill/*/*.proto")
    )
    out = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *out, *protos]
    subprocess.run(command, cwd=root, check=True)
    fresh = sorted((scratch / "tidemill").glob("*/*"))
    assert len(fresh) == len(STUBS) * len(protos)
    pairs = [(file, root / file.relative_to(scratch)) for file in fresh]
    return [new.name for new, kept in pairs if new.read_bytes() != kept.read_bytes()]


def buf_lint(root: Path) -> subprocess.CompletedProcess[str]:
    buf = str(Path(sys.executable).with_name("buf"))
    return subprocess.run([buf, "lint"], cwd=root, capture_output=True, text=True, check=False)


def buf_breaking(root: Path) -> subprocess.CompletedProcess[str]:
    """Compares with the release whose image is kept."""
    buf = str(Path(sys.executable).with_name("buf"))
    image = str(ROOT / "tests" / "fixtures" / "golden" / "release.binpb")
    return subprocess.run(
        [buf, "breaking", "--against", image],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    for name in ("v1", "oip"):
        shutil.copytree(ROOT / "tidemill" / name, tmp_path / "tidemill" / name)
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    (tmp_path / "scratch").mkdir()
    return tmp_path


def test_stubs_are_generated_from_the_contracts(tmp_path: Path) -> None:
    assert drift(ROOT, tmp_path) == []


def test_drift_is_seen(copy: Path) -> None:
    proto = copy / "proto" / "tidemill" / "v1" / "text.proto"
    proto.write_text(
        proto.read_text().replace(
            "message InfillRequest {", "message InfillRequest {\n  bool x = 9;"
        )
    )
    assert drift(copy, copy / "scratch") == ["text_pb2.py", "text_pb2.pyi"]


def test_contracts_are_clean() -> None:
    done = buf_lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lint_sees_a_breach(copy: Path) -> None:
    with (copy / "proto" / "tidemill" / "v1" / "text.proto").open("a") as file:
        file.write("message lower_case {}\n")
    assert "lower_case" in buf_lint(copy).stdout


def test_contracts_break_nobody() -> None:
    """Clients and servers of the last release: see CONTRIBUTING.md for how a release is kept."""
    done = buf_breaking(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("engine", "  uint64 handle = 1;\n  GenerateSpec spec = 2;", "  GenerateSpec spec = 2;",
         'field "1" with name "handle" on message "Submit" was deleted'),
        ("engine", "string stop_string = 3;", "bytes stop_string = 3;", "changed type"),
        ("text", "rpc Tokenize(", "rpc Split(", '"Tokenize"'),
    ],
)  # fmt: skip
def test_a_break_is_seen(copy: Path, file: str, old: str, new: str, said: str) -> None:
    proto = copy / "proto" / "tidemill" / "v1" / f"{file}.proto"
    assert old in proto.read_text()
    proto.write_text(proto.read_text().replace(old, new, 1))
    done = buf_breaking(copy)
    assert done.returncode
    assert said in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("--page", 2)])
def test_flags_of_the_generator_are_no_pages(tmp_path: Path, word: str, status: int) -> None:
    program, env = str(ROOT / "docs" / "generate.py"), {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program, word], cwd=tmp_path, env=env, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (status, [])


def test_configuration_page_is_generated(tmp_path: Path) -> None:
    page = tmp_path / "configuration.md"
    subprocess.run([sys.executable, "docs/generate.py", str(page)], cwd=ROOT, check=True)
    assert page.read_text() == (ROOT / "docs" / "configuration.md").read_text()
    broken = [line for line in page.read_text().splitlines() if line.startswith(" ")]
    assert not broken, "a row of a table is one line"
