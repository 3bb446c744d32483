"""The `tidemill` command: finds the verb and hands the rest of the line to it.

It does not know what a verb does; the verb's module is imported when it is asked for, which keeps
`--help` and `--version` instant.
"""

import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType

import tidemill
from tidemill.commands.pipes import while_read
from tidemill.runtime.errors import ServiceError

VERBS: Mapping[str, str] = MappingProxyType(
    {
        "serve": "start an engine and a frontend, and watch over both",
        "engine": "start only the engine service (token ids over gRPC)",
        "frontend": "start only the frontend (text over gRPC and OpenAI-compatible HTTP)",
        "generate": "complete a prompt in this process, without a server",
        "chat": "talk to a running server",
        "run-batch": "ask a running server what a file of OpenAI batch lines asks",
        "shard": "cut a checkpoint for a number of GPUs ahead of time: tidemill shard MODEL OUTPUT",
        "key": "make an API key for a frontend: tidemill key new NAME",
        "bench": "measure: throughput, latency, online, serve, kernels, quality and more",
        "collect-env": "print what a bug report needs",
    }
)

_SERVICES = ("serve", "engine", "frontend", "shard")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    return while_read(lambda: _main(words or ["--help"]))


def _main(argv: Sequence[str]) -> int:
    verb, *rest = argv
    if verb in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if verb in ("-V", "--version"):
        print(f"tidemill {tidemill.__version__}")
        return 0
    if verb not in VERBS:
        near = get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"tidemill: unknown command {verb!r}{hint}\n\n{_usage()}", file=sys.stderr)
        return 2
    return _run(verb, rest)


def _run(verb: str, argv: Sequence[str]) -> int:
    """A process that is the first of its container gets no signal that it has not asked for, and a
    service asks for SIGTERM only once it serves: until then this ends it, and with it what stands
    half written."""
    if verb in _SERVICES and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        status: int = import_module(f"tidemill.commands.{verb.replace('-', '_')}").run(argv)
    except ServiceError as error:
        print(f"tidemill {verb}: {error.message}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("tidemill", "frontend", "engine_service"):
            raise
        extra = verb if verb in ("engine", "frontend") else "all"
        need = f"tidemill {verb} needs {error.name}: pip install 'tidemill[{extra}]'"
        print(need, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _usage() -> str:
    verbs = "\n".join(f"  {verb:<12} {text}" for verb, text in VERBS.items())
    return (
        "usage: tidemill COMMAND [MODEL] [--flag VALUE ...]\n\n"
        f"{verbs}\n\n"
        "Try `tidemill serve` (built-in model, no download), then `tidemill chat`.\n"
        "`tidemill COMMAND --help` lists the flags; `tidemill --version` prints the version."
    )
