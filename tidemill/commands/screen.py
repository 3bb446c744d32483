"""What a person sees of `tidemill serve`: log lines, progress, one Ready block, one reason.

It does not know processes; on a terminal lines are made readable, elsewhere they pass as they are.
"""

import json
import shlex
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from frontend.config import FrontendConfig
from tidemill.commands.engine_state import Serving
from tidemill.runtime import log

_WORTH_TELLING_S = 0.05


class Screen:
    """Writes log lines and progress to stderr, and the Ready block to stdout."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._seconds: dict[str, float] = {}
        self._started = self._changed = time.monotonic()
        self._stage = "starting processes"
        self._reasons: dict[str, str] = {}
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task(self._stage, total=None)
        if self._console.is_terminal:
            self._progress.start()

    def line(self, module: str, line: str) -> None:
        """One line of a service's stderr."""
        event = _event(line)
        if event is None or event["level"] in ("error", "critical"):
            self._reasons[module] = line.strip() if event is None else str(event["message"])
        if event is not None and self._console.is_terminal:
            line = log.as_text(event)
        self._console.print(line, markup=False, soft_wrap=True)

    def stage(self, detail: str) -> None:
        """What start-up is doing: a name, and `3/12` behind it where a number is known."""
        name, _, count = detail.rpartition(" ")
        done, _, total = count.partition("/")
        known = name != "" and done.isdecimal() and total.isdecimal()
        self._enter(name if known else detail)
        if known:
            self._progress.update(self._task, completed=int(done), total=int(total))

    def ready(self, facts: Serving, frontend: FrontendConfig, host: str) -> None:
        """The one block that says what is served where, and how to try it."""
        self._enter("")
        self.close()
        model = frontend.served_model_name or facts.model
        url = f"{'http' if frontend.tls_cert is None else 'https'}://{host}:{frontend.http_port}/v1"
        path, ask = _trial(model, facts)
        spent = {name: f"{s:.1f}" for name, s in self._seconds.items() if s >= _WORTH_TELLING_S}
        stages = ", ".join(f"{name} {seconds}" for name, seconds in spent.items())
        pages = f"{facts.num_pages:,} pages of {facts.page_size}"
        kept = f"{facts.kv_tokens:,} tokens ({pages})" if facts.method else "none is kept"
        print(
            f"\nTidemill is ready after {self._changed - self._started:.1f} s ({stages})",
            f"  model   {model}: {facts.architecture}, {facts.method or 'encoder'}",
            f"  device  {facts.device}, {facts.dtype}",
            f"  HTTP    {url}",
            f"  gRPC    {host}:{frontend.grpc_port} (tidemill.v1.TextService)",
            f"  engine  {frontend.engine}",
            f"  KV      {kept},"
            f" {facts.max_rows} requests at a time, {facts.max_model_len:,} tokens each",
            f"\n  curl {_safety(frontend)}{url}/{path} -H 'content-type: application/json'"
            f" -d {shlex.quote(json.dumps(ask))}\n",
            sep="\n",
            flush=True,
        )

    def died(self, module: str, how: str) -> None:
        """A service ended that should not have."""
        reason = self._reasons.get(module)
        print(
            f"tidemill serve: {module} {how}" + (f": {reason}" if reason else ""), file=sys.stderr
        )

    def close(self) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def _enter(self, stage: str) -> None:
        if stage == self._stage:
            return
        now = time.monotonic()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._changed
        self._stage, self._changed = stage, now
        self._progress.reset(self._task, description=stage, total=None)


def _safety(frontend: FrontendConfig) -> str:
    """What curl needs beside the address; of a key only where it belongs."""
    words = ["--cacert CA.pem"] * (frontend.tls_cert is not None)
    words += ["--cert CLIENT.pem --key CLIENT.key"] * (frontend.tls_client_ca is not None)
    if frontend.api_key is not None or frontend.api_keys_file is not None:
        words.append("-H 'authorization: Bearer KEY'")
    return " ".join([*words, ""])


def _trial(model: str, facts: Serving) -> tuple[str, dict[str, Any]]:
    """A route and a body to try it with."""
    if not facts.method:
        return "embeddings", {"model": model, "input": ["harbour"]}
    messages = [{"role": "user", "content": "reverse: harbour"}]
    return "chat/completions", {"model": model, "messages": messages, "stream": True}


def _event(line: str) -> dict[str, Any] | None:
    """The fields of one of our own JSON log lines; None for anything else."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    own = isinstance(event, dict) and {"time", "level", "logger", "message"} <= event.keys()
    return event if own else None
