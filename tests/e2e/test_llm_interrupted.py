"""Ctrl-C in an offline program: the call ends, the LLM goes on as if it had not been asked."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidemill.interrupts import unbroken

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900
"""A hundred calls and more on a slow machine."""
PROGRAM = """
import faulthandler, os, random, signal, sys, threading, time
from contextlib import contextmanager
import tidemill.interrupts

signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored in a shell's background
if sys.argv[1] == "control":
    @contextmanager
    def torn():
        yield
    tidemill.interrupts.unbroken = torn

from tidemill import LLM, SamplingParams

llm = LLM("demo", max_rows=4)
prompts = ["ROMEO:", "add: 12+34 =", "sort: dbca =", "To be, or not", "count: 37 n=5", "Once more"]
# Two waves of four rows, over a border of two pages; the shorter a call is, the more of the
# interrupts come as it begins, as its requests end, and between the two waves.
sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def ask():
    return [one.outputs[0].token_ids for one in llm.generate(prompts, sampling, use_tqdm=False)]


began = time.monotonic()
want = ask()
took = time.monotonic() - began
draw, num_heard = random.Random(5), 0
for _ in range(40):
    if sys.argv[1] == "control":  # what is torn may wait for ever: that shows as well
        faulthandler.dump_traceback_later(30 + 30 * took, exit=True)
    told = threading.Timer(draw.random() * took, os.kill, (os.getpid(), signal.SIGINT))
    try:
        told.start()
        while True:
            ask()
    except KeyboardInterrupt:
        num_heard += 1
    told.join()
    assert not llm._live and not llm._requests
    assert ask() == want
    assert not llm.has_unfinished_requests, "something goes on behind the call"
    assert llm.engine.scheduler._pages.num_used == 0, "pages leaked"
print(num_heard)
"""


def interrupted(body: Callable[[], object]) -> None:
    with unbroken():
        signal.raise_signal(signal.SIGINT)
        body()


def around(body: Callable[[], object]) -> None:
    with unbroken():
        interrupted(lambda: None)
        body()


@pytest.fixture
def _hears() -> Iterator[None]:
    """What a shell runs in its background ignores Ctrl-C, and so would this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_hears")
def test_ctrl_c_waits_for_the_end_and_is_not_lost() -> None:
    """Also where what runs fails, and where one such part stands in another."""
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: done.append("whole"))
    assert done == ["whole"]

    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted(fail)
    assert isinstance(caught.value.__context__, ValueError)
    with pytest.raises(KeyboardInterrupt):
        around(lambda: done.append("the outer part goes on"))
    assert len(done) == 2
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: (signal.raise_signal(signal.SIGINT), done.append("too late")))
    assert len(done) == 2, "the second one is heard at once"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def run(how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, how]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_call_that_is_interrupted_leaves_nothing() -> None:
    ended = run("whole")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == ["40"], "each Ctrl-C was heard, once"


@pytest.mark.slow
def test_control_a_step_that_is_torn_shows() -> None:
    assert run("control").returncode != 0
