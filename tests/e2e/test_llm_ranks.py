"""tidemill.LLM over several ranks: what a user's program sees when one is lost, or when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
WITHIN_S = 30.0
"""Until a loss is told on a machine that is busy with other tests; nobody would hear of it at all
without the watcher."""
PROMISED_S = 5.5
"""On one that is not: half a second in which all is well, and the five that are promised."""
PROMISE = [pytest.mark.slow, pytest.mark.alone]
TENSOR, STAGES = "tensor_parallel_size", "pipeline_parallel_size"
SCRIPT = """
import gc, os, signal, sys, threading, time
from pathlib import Path
from tests.waiting import stopwatch
from tidemill import LLM, SamplingParams
from tidemill.runtime.errors import EngineDead

def text_of(path):
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # a thread or a process that has ended since it was listed

def children():
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(child) for task in tasks for child in text_of(task).split()]

def running():
    stats = {pid: text_of(Path(f"/proc/{pid}/stat")).split() for pid in children()}
    return [pid for pid, fields in stats.items() if fields and fields[2] != "Z"]

def generate(llm, max_tokens=1900):
    return llm.generate("The king", SamplingParams(max_tokens=max_tokens, ignore_eos=True), False)

llm = LLM("demo", device="cpu", max_rows=4, tensor_parallel_size=2, log_level="warning")
assert len(generate(llm, 5)[0].outputs[0].token_ids) == 5
(follower,) = children()
"""
LOST = """
threading.Timer(0.5, os.kill, [follower, signal.{sent}]).start()
try:
    with stopwatch() as awake_s:
        generate(llm)
except EngineDead as error:
    print(type(error).__name__, error)
    assert awake_s() < WITHIN_S, awake_s()
try:
    generate(llm)
except EngineDead as error:
    print("again", error)
llm.close()
assert not children(), children()
print("the program goes on")
"""
INTERRUPTED = """
real = llm.engine.executor.own.launch
def launch(plan):
    raise KeyboardInterrupt
llm.engine.executor.own.launch = launch
try:
    generate(llm)
except KeyboardInterrupt:
    print("interrupted")
llm.engine.executor.own.launch = real
try:
    generate(llm)
except EngineDead as error:
    print(error)
deadline = time.monotonic() + 60
while running():
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""
LEFT_BEHIND = """
os.kill(follower, signal.SIGSTOP)
for text in ("The king", "The queen"):
    llm.add_request(text, SamplingParams(max_tokens=40))
llm.step()  # what this one passes on is not received
real = llm.engine.executor.own.launch
def launch(plan):
    raise KeyboardInterrupt
llm.engine.executor.own.launch = launch
try:
    llm.step()
except KeyboardInterrupt:
    print("interrupted")
with stopwatch() as awake_s:
    llm.close()
assert awake_s() < WITHIN_S, awake_s()
assert not children(), children()
import torch.distributed
print(torch.distributed.is_initialized())
"""
FORGOTTEN = """
before = len(os.listdir("/proc/self/fd"))
del llm
gc.collect()
print(children(), threading.active_count())
llm = LLM("demo", device="cpu", max_rows=4, tensor_parallel_size=2, log_level="warning")
assert len(generate(llm, 5)[0].outputs[0].token_ids) == 5
assert len(os.listdir("/proc/self/fd")) == before, (before, len(os.listdir("/proc/self/fd")))
print(*children())
"""
FORKED = """
child = os.fork()
if not child:
    signal.alarm(20)  # nobody else would end it
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert len(generate(llm, 5)[0].outputs[0].token_ids) == 5
print("the program goes on", len(running()))
"""
WITHIN_A_BLOCK = """
try:
    with llm as same:
        assert same is llm
        assert llm.engine.profiler._away == llm.engine.executor.away
        assert len(generate(llm, 5)[0].outputs[0].token_ids) == 5
        assert children() == [follower]
        raise ValueError("of the block")
except ValueError as error:
    print(error, children())
"""


LOST_AT_FIRST = """
import os
from engine_service.ranks import group
from tidemill import LLM
from tidemill.runtime.errors import EngineDead
group.open_group.__kwdefaults__["module"] = "tests.service.faulty_ranks"
try:
    LLM("demo", device="cpu", tensor_parallel_size=2, log_level="warning")
except EngineDead as error:
    print(error)
"""
SLOW_TO_LOAD = """
import time
from engine_service import distributed
from engine_service.ranks import group
from engine_service.worker import worker
from tidemill import LLM, SamplingParams
group.open_group.__kwdefaults__["module"] = "tests.service.faulty_ranks"
distributed._MEET_S = 8.0
load_model = worker.load_model
def load_late(*args, **named):
    time.sleep(12.0)
    return load_model(*args, **named)
worker.load_model = load_late
llm = LLM("demo", device="cpu", tensor_parallel_size=2, log_level="warning")
(made,) = llm.generate("The king", SamplingParams(max_tokens=5, ignore_eos=True), False)
print(len(made.outputs[0].token_ids))
"""


def run(
    script: str, device: str = "cpu", size: str = TENSOR, within_s: float = WITHIN_S
) -> list[str]:
    """What a program prints that begins with an LLM of two ranks."""
    program = (SCRIPT + script).replace('"cpu"', repr(device)).replace(TENSOR, size)
    return run_alone(program.replace("WITHIN_S", str(within_s)))


def run_alone(program: str, **variables: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_ranks_wait_for_one_that_takes_longer_to_load_than_to_come() -> None:
    assert run_alone(SLOW_TO_LOAD, TIDEMILL_TEST_FAULT="patience") == ["5"]


@pytest.mark.parametrize("where", ["meet", "group"])
def test_a_rank_that_is_lost_where_all_meet_is_told(where: str) -> None:
    """Rank 0 would wait for it there for as long as loading may take."""
    (told,) = run_alone(LOST_AT_FIRST, TIDEMILL_TEST_FAULT=where)
    assert "was killed by SIGKILL while loading" in told


@pytest.mark.parametrize(
    ("sent", "told"), [("SIGKILL", "was killed by SIGKILL"), ("SIGSTOP", "has shown no life for")]
)
@pytest.mark.parametrize("within_s", [WITHIN_S, pytest.param(PROMISED_S, marks=PROMISE)])
def test_a_lost_rank_is_an_error_and_the_program_goes_on(
    sent: str, told: str, within_s: float
) -> None:
    first, second, last = run(LOST.format(sent=sent), within_s=within_s)
    assert first.startswith("EngineDead rank 1 (pid ")
    assert told in first
    assert told in second
    assert last == "the program goes on"


def test_an_interrupted_step_ends_the_ranks_which_would_differ() -> None:
    interrupted, told = run(INTERRUPTED)
    assert interrupted == "interrupted"
    assert told == "rank 0 failed: KeyboardInterrupt: "


@pytest.mark.parametrize("within_s", [WITHIN_S, pytest.param(PROMISED_S, marks=PROMISE)])
def test_an_interrupted_step_leaves_nothing_of_a_stage_that_hears_no_more(within_s: float) -> None:
    assert run(LEFT_BEHIND, size=STAGES, within_s=within_s) == ["interrupted", "False"]


def test_a_copy_of_the_program_ends_without_the_ranks() -> None:
    """Whose threads and processes are not its own: their ends would never come."""
    assert run(FORKED) == ["the program goes on 1"]


def test_a_with_block_ends_the_other_ranks() -> None:
    assert run(WITHIN_A_BLOCK) == ["of the block []"]


def test_an_llm_that_is_forgotten_leaves_nothing_and_another_may_follow() -> None:
    gone, pid = run(FORGOTTEN)
    assert gone.startswith("[] ")
    assert not Path(f"/proc/{pid}").exists(), "a follower outlives the program"
