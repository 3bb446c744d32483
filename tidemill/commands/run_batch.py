"""`tidemill run-batch -i FILE -o FILE`: asks a running server what OpenAI batch lines ask.

It does not know how a line is read or how a request is sent.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tidemill.commands.batch_lines import (
    Answers,
    Refused,
    Request,
    read_requests,
    refused_line,
)
from tidemill.commands.console import PlainConsole
from tidemill.runtime import options
from tidemill.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from tidemill.commands.batch_requests import Server

_SHORT = {"-i": "--input-file", "-o": "--output-file"}
_INTERRUPTED = 130
_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatchOptions:
    """What to ask, and whom."""

    input_file: str
    """Requests, one object with custom_id, method, url and body per line; or -i."""
    output_file: str
    """Answers, one line per request, in the order in which they come; or -o. What is answered in
    it already is not asked again."""
    url: str = "http://127.0.0.1:8000"
    """Address of a frontend's HTTP interface. With https, the variable SSL_CERT_FILE names a CA
    that is not a public one."""
    api_key: options.Secret | None = None
    """Key for a server that asks for one; better given as the variable TIDEMILL_API_KEY."""
    concurrency: int = 64
    """Requests at a time."""
    max_retries: int = 12
    """How often a request is sent again while the server is away or full (no connection, 429, 502,
    503); pauses grow to 8 s, or are what the server asks for."""
    timeout_s: float | None = 3600.0
    """Longest wait for one answer."""


@dataclass
class Tally:
    """How the lines of the input ended."""

    path: Path
    total: int
    num_before: int = 0
    """Answered by earlier runs."""
    num_answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    nameless: list[Refused] = field(default_factory=list)
    """Lines without a custom_id."""

    @property
    def num_done(self) -> int:
        return self.num_before + self.num_answered + self.failures.total() + len(self.nameless)

    def report(self) -> Iterator[str]:
        """Lines for a person."""
        answered = self.num_before + self.num_answered
        before = f" ({self.num_before:,} before this run)" if self.num_before else ""
        yield f"{self.path}: {answered:,} of {self.total:,} answered{before}"
        if self.failures:
            reasons = ", ".join(f"{count:,} {why}" for why, count in self.failures.most_common())
            yield f"{self.failures.total():,} failed ({reasons}); the same command asks them again"
        for line in self.nameless:
            yield f"line {line.number} has no line in the output: {line.error.message}"
        if left := self.total - self.num_done:
            yield f"{left:,} were not finished; the same command goes on with them"


class Screen:
    """What a person sees on stderr: a bar on a terminal, and each reason to wait once."""

    def __init__(self, url: str, total: int) -> None:
        self._url = url
        self._told: set[str] = set()
        self._console = PlainConsole()
        hidden = not self._console.is_terminal
        self.bar = Progress(*_COLUMNS, console=self._console, transient=True, disable=hidden)
        self._task = self.bar.add_task("answered", total=total)

    def tell_pause(self, reason: str) -> None:
        """A request is going to be asked again."""
        if reason not in self._told:
            self._told.add(reason)
            self._console.show(f"{self._url}: {reason}; trying again")

    def show(self, num_done: int) -> None:
        """Moves the bar."""
        self.bar.update(self._task, completed=num_done)


@dataclass(frozen=True, slots=True)
class Batch:
    """The lines that are still to be answered, and all that takes part in it."""

    lines: Iterator[Request | Refused]
    server: "Server"
    answers: Answers
    tally: Tally
    screen: Screen

    async def run(self, concurrency: int) -> None:
        """Answers them, `concurrency` at a time; the first error of ours ends all."""
        workers = [asyncio.create_task(self._answer_some()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _answer_some(self) -> None:
        """All workers share the lines: who is free takes the next."""
        for line in self.lines:
            if isinstance(line, Request):
                outcome = await self.server.ask(line)
                self._add(outcome.line, outcome.failure)
            elif line.custom_id is not None:
                self._add(refused_line(line), line.error.reason.lower())
            else:
                self.tally.nameless.append(line)
            self.screen.show(self.tally.num_done)

    def _add(self, line: dict[str, Any], failure: str) -> None:
        self.answers.write(line)
        if failure:
            self.tally.failures[failure] += 1
        else:
            self.tally.num_answered += 1


def run(argv: Sequence[str]) -> int:
    """Writes an answer per line; returns 0 if all have one, 1 if not, 130 after Ctrl-C."""
    given = [_SHORT.get(word, word) for word in argv]
    (wanted,) = options.parse([RunBatchOptions], given, prog="tidemill run-batch")
    _check(wanted)
    # httpx is slow to import, and --help does not need it.
    from tidemill.commands.batch_requests import Server, base_url, http_client

    client = http_client(
        base_url(wanted.url), wanted.concurrency, wanted.timeout_s, wanted.api_key or ""
    )
    tally, custom_ids = _surveyed(Path(wanted.input_file), Path(wanted.output_file))
    answers = Answers(tally.path, custom_ids)
    screen = Screen(wanted.url, tally.total)

    async def ask_all() -> None:
        async with client:
            server = Server(client, wanted.max_retries, screen.tell_pause)
            lines = _unanswered(Path(wanted.input_file), answers.done, tally)
            batch = Batch(lines, server, answers, tally, screen)
            await batch.run(min(wanted.concurrency, tally.total))

    try:
        with screen.bar:
            asyncio.run(ask_all())
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        answers.close()
        print(*tally.report(), sep="\n", file=sys.stderr)
    return int(bool(tally.failures or tally.nameless))


def _check(wanted: RunBatchOptions) -> None:
    for name, least in (("concurrency", 1), ("max_retries", 0)):
        if getattr(wanted, name) < least:
            raise InvalidRequest(
                f"{options.flag_of(name)} is {getattr(wanted, name)}; it must be at least {least}",
                param=name,
            )
    if wanted.timeout_s is not None and not wanted.timeout_s > 0:
        raise InvalidRequest(
            f"--timeout-s is {wanted.timeout_s}; it must be above 0, or none", param="timeout_s"
        )


def _surveyed(asked: Path, path: Path) -> tuple[Tally, set[str]]:
    """Nothing done of the whole input, and its custom_ids.

    The input is read twice rather than kept: a batch may be larger than memory should be.
    """
    try:
        if path.exists() and path.samefile(asked):
            raise InvalidRequest(
                f"{path} is the input; choose another --output-file", param="output_file"
            )
        if asked.exists() and not asked.is_file():
            raise InvalidRequest(
                f"{asked} is not a file; the input is read twice", param="input_file"
            )
        tally, custom_ids = Tally(path, 0), set()
        for line in read_requests(asked):
            tally.total += 1
            if line.custom_id is not None:
                custom_ids.add(line.custom_id)
    except OSError as failure:
        raise InvalidRequest(
            f"cannot read {asked}: {failure.strerror}", param="input_file"
        ) from failure
    return tally, custom_ids


def _unanswered(asked: Path, done: set[str], tally: Tally) -> Iterator[Request | Refused]:
    """The lines that earlier runs did not answer; a second line of the same custom_id is one."""
    left = set(done)
    for line in read_requests(asked):
        if line.custom_id in left:
            left.remove(line.custom_id)
            tally.num_before += 1
        else:
            yield line
