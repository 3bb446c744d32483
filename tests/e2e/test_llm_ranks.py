"""tidemill.LLM over several ranks: what a user's program sees when one is lost, or when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
TENSOR, STAGES = "tensor_parallel_size", "pipeline_parallel_size"
SCRIPT = """
import gc, os, signal, sys, threading, time
from pathlib import Path
from tidemill import LLM, SamplingParams
from tidemill.runtime.errors import EngineDead

def children():
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]

def running():
    stats = {pid: Path(f"/proc/{pid}/stat").read_text().split() for pid in children()}
    return [pid for pid, fields in stats.items() if fields[2] != "Z"]

def generate(llm, max_tokens=1900):
    return llm.generate("The king", SamplingParams(max_tokens=max_tokens, ignore_eos=True), False)

llm = LLM("demo", device="cpu", max_rows=4, tensor_parallel_size=2, log_level="warning")
assert len(generate(llm, 5)[0].outputs[0].token_ids) == 5
(follower,) = children()
"""
LOST = """
began = time.monotonic()
threading.Timer(0.5, os.kill, [follower, signal.{sent}]).start()
try:
    generate(llm)
except EngineDead as error:
    print(type(error).__name__, error)
    assert time.monotonic() - began < 5.5, time.monotonic() - began
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
deadline = time.monotonic() + 5
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
began = time.monotonic()
llm.close()
assert time.monotonic() - began < 5.5, time.monotonic() - began
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


def run(script: str, device: str = "cpu", size: str = TENSOR) -> list[str]:
    """What a program prints that begins with an LLM of two ranks."""
    program = (SCRIPT + script).replace('"cpu"', repr(device)).replace(TENSOR, size)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("sent", "told"), [("SIGKILL", "was killed by SIGKILL"), ("SIGSTOP", "has shown no life for")]
)
def test_a_lost_rank_is_an_error_and_the_program_goes_on(sent: str, told: str) -> None:
    first, second, last = run(LOST.format(sent=sent))
    assert first.startswith("EngineDead rank 1 (pid ")
    assert told in first
    assert told in second
    assert last == "the program goes on"


def test_an_interrupted_step_ends_the_ranks_which_would_differ() -> None:
    interrupted, told = run(INTERRUPTED)
    assert interrupted == "interrupted"
    assert told == "rank 0 failed: KeyboardInterrupt: "


def test_an_interrupted_step_leaves_nothing_of_a_stage_that_hears_no_more() -> None:
    assert run(LEFT_BEHIND, size=STAGES) == ["interrupted", "False"]


def test_an_llm_that_is_forgotten_leaves_nothing_and_another_may_follow() -> None:
    gone, pid = run(FORGOTTEN)
    assert gone.startswith("[] ")
    assert not Path(f"/proc/{pid}").exists(), "a follower outlives the program"
