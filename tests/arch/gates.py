"""The rules of the house that a machine can check, each a function from a tree to violations.

Every gate gets the root of a tree, so that a test can also show it a tree that breaks the rule.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGES = ("tidemill", "frontend", "engine_service")
FILE_LINES, KERNEL_LINES, TEST_LINES = 300, 400, 400
FUNCTION_LINES, INIT_LINES, RUNTIME_LINES = 50, 12, 540

GENERATED = ("tidemill.v1.", "tidemill.oip.", "smg_grpc_proto.generated.")
STUB_IMPORTERS = (
    (r"engine_service/server/convert(_\w+)?\.py", r"engine_pb2"),
    (r"engine_service/server/(launch|sideline|servicer\w*|transfer_in)\.py", r"engine_pb2_grpc"),
    (r"engine_service/server/vllm_engine/convert_\w+\.py", r"(common|vllm_engine)_pb2(_grpc)?"),
    (r"frontend/engine_(client|convert|events|pool|slots)\.py", r"engine_pb2(_grpc)?"),
    (r"frontend/api/grpc_text\w*\.py", r"(engine|text)_pb2(_grpc)?"),
    (r"frontend/api/grpc_oip\w*\.py", r"open_inference_pb2"),
    (r"tidemill/client\.py", r"(engine|text)_pb2(_grpc)?"),
    (r"tidemill/commands/engine_state\.py", r"engine_pb2(_grpc)?"),
    (r"tidemill/bench/(stack|clock_engine)\.py", r"engine_pb2(_grpc)?"),
    (r"tidemill/bench/chats\.py", r"(engine|text)_pb2"),
    (r"tidemill/bench/traffic/(grpc_face|look_up)\.py", r"text_pb2(_grpc)?"),
    (r"tidemill/runtime/\w+\.py", r"\w+_pb2_grpc"),
)
"""Which files may import which generated modules; nobody else may import any."""

OPTIONAL_WHEELS = {
    "flash_attn", "flash_attn_interface", "grpc_reflection", "huggingface_hub",
    "kubernetes_asyncio", "opentelemetry", "quack", "ray", "sentencepiece", "smg_grpc_proto",
    "tokenizers", "tqdm", "transformers",
}  # fmt: skip
"""What only some installations have, or only some runs need."""

LAZY_IMPORTS = {
    "engine_service/composition.py": "reports its first stage before torch is loaded",
    "engine_service/follower.py": "dies with rank 0 also while torch is loaded",
    "tidemill/bench": "options are read before torch is loaded",
    "tidemill/commands": "a verb loads torch only when it runs",
}
"""Where a function may import anything, and why."""

BANNED_FILES = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
BANNED_NAMES = re.compile(r"^(data|info)$|helper|^_?(process|handle)_[a-z]", re.IGNORECASE)


def sources(root: Path, *tops: str) -> Iterator[tuple[str, str]]:
    """(relative path, text) of our own Python files below the packages, or below `tops`."""
    for top in tops or PACKAGES:
        for path in sorted((root / top).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(("tidemill/v1/", "tidemill/oip/")):
                yield name, path.read_text()


def trees(root: Path, *tops: str) -> Iterator[tuple[str, ast.Module]]:
    return ((name, _tree(text, name)) for name, text in sources(root, *tops))


@cache
def _tree(text: str, name: str) -> ast.Module:
    """Many rules go through the same files."""
    return ast.parse(text, name)


def long_files(root: Path) -> list[str]:
    found = []
    for name, text in sources(root, *PACKAGES, "tests", "benchmarks", "docs", "examples"):
        kernel = name.startswith("engine_service/kernels/")
        limit = KERNEL_LINES if kernel else TEST_LINES if name.startswith("tests/") else FILE_LINES
        if (lines := text.count("\n")) > limit:
            found.append(f"{name}: {lines} lines, limit {limit}")
    return found


def long_functions(root: Path) -> list[str]:
    found = []
    for name, tree in trees(root, *PACKAGES, "benchmarks", "docs", "examples"):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    found.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
    return found


def long_inits(root: Path) -> list[str]:
    return [
        f"{name}: {text.count(chr(10))} lines, limit {INIT_LINES}"
        for name, text in sources(root)
        if name.endswith("__init__.py") and text.count("\n") > INIT_LINES
    ]


def large_runtime(root: Path) -> list[str]:
    """What both services share stays small: lines of code, without docstrings and blanks."""
    total = sum(code_lines(text) for _, text in sources(root, "tidemill/runtime"))
    return [f"tidemill/runtime: {total} lines of code"] if total > RUNTIME_LINES else []


def code_lines(text: str) -> int:
    """Lines that hold code: no blanks, no comments, no strings that stand alone."""
    tree = ast.parse(text)
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    numbered = enumerate(text.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in strings
        for number, line in numbered
    )


def stray_stubs(root: Path) -> list[str]:
    """Generated messages are known to the files that translate them, and to nobody else."""
    found = []
    for name, tree in trees(root):
        allowed = next((stubs for path, stubs in STUB_IMPORTERS if re.fullmatch(path, name)), "$")
        for node in ast.walk(tree):
            stubs = [m.split(".")[2] for m in _imported(node) if m.startswith(GENERATED)]
            line = getattr(node, "lineno", 0)
            found += [f"{name}:{line} {s}" for s in stubs if not re.fullmatch(allowed, s)]
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def circular_imports(root: Path) -> list[str]:
    """Which of two modules that import each other can be imported depends on who comes first."""
    found = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree.body
        for name, tree in trees(root)
    }
    graph = {
        module: {
            one if one in found else one.rpartition(".")[0]
            for node in body
            for one in _imported(node)
        }
        for module, body in found.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as failure:
        return [" imports ".join(reversed(failure.args[1]))]
    return []


def inner_imports(root: Path) -> list[str]:
    found = []
    for name, tree in trees(root):
        if name.startswith(tuple(LAZY_IMPORTS)):
            continue
        inner = {
            (node.lineno, module)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
            for module in _imported(node)
            if module.split(".")[0] not in OPTIONAL_WHEELS
        }
        found += [f"{name}:{line} imports {module}" for line, module in sorted(inner)]
    return found


def banned_words(root: Path) -> list[str]:
    found = []
    for name, tree in trees(root):
        if Path(name).name in BANNED_FILES:
            found.append(f"{name}: says nothing about what is in it")
        for node in ast.walk(tree):
            found += [
                f"{name}:{node.lineno} {word}"  # type: ignore[attr-defined]
                for word in _named(node)
                if BANNED_NAMES.search(word)
            ]
    return found


def _named(node: ast.AST) -> list[str]:
    """The names that a node gives to something."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    return []


def swallowed_errors(root: Path) -> list[str]:
    """A handler that names no error, or that takes every error and does nothing."""
    found = []
    for name, tree in trees(root):
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is not None and ast.unparse(node.type) in (
                "Exception",
                "BaseException",
            )
            if node.type is None or (broad and all(isinstance(x, ast.Pass) for x in node.body)):
                found.append(f"{name}:{node.lineno}")
    return found


def loose_ends(root: Path) -> list[str]:
    """Marks of unfinished work, and statements that give a module a changing state."""
    word = re.compile(r"#.*\b(TO[D]O|FIX[M]E|XX[X]|HAC[K])\b")
    found = []
    for name, text in sources(root, *PACKAGES, "tests", "benchmarks", "docs", "examples"):
        lines = enumerate(text.splitlines(), 1)
        found += [f"{name}:{number} {line.strip()}" for number, line in lines if word.search(line)]
    for name, tree in trees(root):
        found += [
            f"{name}:{node.lineno} global"
            for node in ast.walk(tree)
            if isinstance(node, ast.Global)
        ]
    return found


def silent_modules(root: Path) -> list[str]:
    """Modules that do not say what they are for."""
    return [name for name, tree in trees(root) if tree.body and not ast.get_docstring(tree)]


def undocumented_fields(root: Path) -> list[str]:
    """Fields of a config without the string that becomes their help text."""
    found = []
    for name, tree in trees(root):
        if not name.endswith("config.py"):
            continue
        for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for node, after in zip(kind.body, [*kind.body[1:], None], strict=True):
                told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(node, ast.AnnAssign) and not told:
                    found.append(f"{name}:{node.lineno} {kind.name}.{ast.unparse(node.target)}")
    return found


PICKLE_READERS = {
    "engine_service/pipe.py": "a socket pair between processes of one start, or what ranks/link.py "
    "found to be of the same start: every frame carries an HMAC under its secret",
    "frontend/template_pool.py": "pipes to processes of its own",
    "frontend/template_worker.py": "its parent's end of such a pipe",
}
"""Who may read pickles, and where these come from: never from a file, never from a network."""


def foreign_code(root: Path) -> list[str]:
    """What would run code that came with a model: pickles, and programs beside the weights."""
    found = []
    for name, tree in trees(root):
        for node in ast.walk(tree):
            line, words = getattr(node, "lineno", 0), _imported(node)
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "weights_only"):
                words = [node.arg]
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
                words = ["torch.load"]
            foreign = {word.split(".")[0] for word in words} & {"pickle", "dill", "cloudpickle"}
            foreign |= {"trust_remote_code", "weights_only", "torch.load"} & set(words)
            if foreign and not (name in PICKLE_READERS and foreign == {"pickle"}):
                found += [f"{name}:{line} {word}" for word in sorted(foreign)]
    return found


def _kept_files(root: Path) -> list[str]:
    """What git keeps or would keep; without git, everything outside hidden folders."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if listed.stdout:
        return listed.stdout.splitlines()
    names = [path.relative_to(root) for top in root.glob("[!.]*") for path in top.rglob("*.*")]
    return [name.as_posix() for name in names if "__pycache__" not in name.parts]


_PLACES = re.compile(
    r"(?<![\w.$}>:/])/(work|root|home|Users|opt|mnt)/\w"
    r"|\b(pypi|pythonhosted|npmjs|debian|ghcr|docker|quay)\.(org|com|io)\b"
    r"|--(extra-)?index-" + "url|--find-" + "links"
)


def foreign_places(root: Path) -> list[str]:
    """Absolute paths of one machine and addresses of package registries."""
    found = []
    for name in _kept_files(root):
        path = root / name
        if not path.is_file() or path.stat().st_size > 1 << 20 or name == "tests/arch/gates.py":
            continue
        lines = enumerate(path.read_text(errors="ignore").splitlines(), 1)
        found += [
            f"{name}:{number} {line.strip()}" for number, line in lines if _PLACES.search(line)
        ]
    return found
