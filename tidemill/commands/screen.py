"""What a person sees of `tidemill serve`: log lines, progress, one Ready block, one reason.

It does not know processes; on a terminal lines are made readable, elsewhere they pass as they are.
"""

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from frontend.config import FrontendConfig
from frontend.model_names import read_names
from tidemill.commands.console import PlainConsole
from tidemill.commands.engine_state import Serving
from tidemill.runtime import log

_WORTH_TELLING_S = 0.05
_FIELDS = ("time", "level", "service", "logger", "message")
"""Texts of every line of ours; libraries that log in JSON have others."""


class _Way:
    """The stages of one engine's start, and how long each took."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._label = label
        self.seconds: dict[str, float] = {}
        self.began = self.changed = time.monotonic()
        self._stage = "starting processes"
        self._task = progress.add_task(self._label + self._stage, total=None)

    def go(self, detail: str) -> None:
        """On to a stage: a name, and `3/12` behind it where a number is known."""
        name, _, count = detail.rpartition(" ")
        done, _, total = count.partition("/")
        known = name != "" and done.isdecimal() and total.isdecimal()
        self.enter(name if known else detail)
        if known:
            self._progress.update(self._task, completed=int(done), total=int(total))

    def enter(self, stage: str) -> None:
        if stage == self._stage:
            return
        now = time.monotonic()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self.changed
        self._stage, self.changed = stage, now
        self._progress.reset(self._task, description=self._label + stage, total=None)


class Screen:
    """Writes log lines and progress to stderr, and the Ready block to stdout. `prog` is the command
    that errors name, `engines` are the names of those that are on their way."""

    def __init__(self, prog: str, engines: Sequence[str]) -> None:
        self._prog = prog
        self._console = PlainConsole()
        self._reasons: dict[str, str] = {}
        self._refusals: dict[str, str] = {}
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=self._console, transient=True)
        labels = {name: f"{name}: " if len(engines) > 1 else "" for name in engines}
        self._ways = {name: _Way(self._progress, label) for name, label in labels.items()}
        if self._console.is_terminal:
            self._progress.start()

    def line(self, name: str, line: str, labels: Mapping[str, str]) -> None:
        """One line of a service's stderr. `labels` say which one of several it is: fields of a JSON
        line, words in front of any other. Why it cannot start is shown with its end, once."""
        event = _event(line)
        if event is None or event["level"] in ("error", "critical"):
            self._reasons[name] = line.strip() if event is None else str(event["message"])
        if event is None:
            line = "".join(f"{value}: " for value in labels.values()) + line
        elif self._console.is_terminal:
            line = log.as_text(event | dict(labels))
        elif labels:
            line = json.dumps(event | dict(labels))
        if event is not None and event.keys() >= log.START_REFUSED.keys():
            self._refusals[name] = line
        else:
            self._show(line)

    def _show(self, line: str) -> None:
        with _despite_full_disk():
            self._console.show(line)

    def stage(self, name: str, detail: str) -> None:
        """What an engine's start is doing."""
        self._ways[name].go(detail)

    def _last(self) -> _Way:
        """The way of the engine that all waited for."""
        return max(self._ways.values(), key=lambda way: way.changed)

    def waits_for_frontend(self) -> None:
        """The engines serve."""
        self._last().enter("frontend")

    def ready(self, engines: Sequence[Serving], frontend: FrontendConfig, host: str) -> None:
        """The one block that says what is served where, and how to try it."""
        way, facts = self._last(), engines[0]
        way.enter("")
        self.close()
        names = read_names(frontend.served_model_name, facts.model)
        told = ", ".join(names.listed)
        url = f"{'http' if frontend.tls_cert is None else 'https'}://{host}:{frontend.http_port}/v1"
        path, ask = _trial(names.first, facts)
        spent = {name: f"{s:.1f}" for name, s in way.seconds.items() if s >= _WORTH_TELLING_S}
        stages = ", ".join(f"{name} {seconds}" for name, seconds in spent.items())
        pages = sum(one.num_pages for one in engines)
        tokens = f"{sum(one.kv_tokens for one in engines):,} tokens"
        kept = (
            f"{tokens} ({pages:,} pages of {facts.page_size})" if facts.method else "none is kept"
        )
        print(
            f"\nTidemill is ready after {way.changed - way.began:.1f} s ({stages})",
            f"  model   {told}: {facts.architecture}, {facts.method or 'encoder'}",
            f"  device  {', '.join(dict.fromkeys(one.device for one in engines))}, {facts.dtype}",
            f"  HTTP    {url}",
            f"  gRPC    {host}:{frontend.grpc_port} (tidemill.v1.TextService)",
            f"  engine  {frontend.engine.replace(',', ', ')}",
            f"  KV      {kept}, {sum(one.max_rows for one in engines)} requests at a time,"
            f" {facts.max_model_len:,} tokens each",
            f"\n  curl {_safety(frontend)}{url}/{path} -H 'content-type: application/json'"
            f" -d {shlex.quote(json.dumps(ask))}\n",
            sep="\n",
            flush=True,
        )

    def all_serve(self, addresses: Sequence[str]) -> None:
        """What there is to say where no frontend makes them one server."""
        self.close()
        self._tell(f"all {len(addresses)} engines serve: {', '.join(addresses)}")

    def restarts(self, name: str, how: str, pause_s: float) -> None:
        """An engine ended, and others serve: it will be there again."""
        self._tell(f"{self._ended(name, how)}; the others serve, it starts again in {pause_s:g} s")

    def returned(self, name: str, seconds: float) -> None:
        """It serves again."""
        self._reasons.pop(name, None)
        self._tell(f"{name} serves again, {seconds:.1f} s after its start")

    def died(self, name: str, how: str) -> None:
        """A service ended that should not have, and with it everything."""
        self._tell(self._ended(name, how))

    def rest(self) -> None:
        """Why services could not start whose ends were not told, because all was ending."""
        for line in self._refusals.values():
            self._show(line)

    def close(self) -> None:
        """No more progress; lines go on."""
        if self._console.is_terminal:
            self._progress.stop()

    def _ended(self, name: str, how: str) -> str:
        reason = self._reasons.get(name)
        self._refusals.pop(name, None)
        return f"{name} {how}" + (f": {reason}" if reason else "")

    def _tell(self, text: str) -> None:
        with _despite_full_disk():
            print(f"{self._prog}: {text}", file=sys.stderr, flush=True)


def _despite_full_disk() -> contextlib.suppress:
    """Lines that cannot be written are lost: a service whose lines nobody takes any more would stop
    as soon as the pipe between is full."""
    return contextlib.suppress(OSError)


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
    if not isinstance(event, dict) or not all(isinstance(event.get(one), str) for one in _FIELDS):
        return None
    return event
