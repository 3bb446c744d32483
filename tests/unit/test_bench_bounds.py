"""Numbers that no benchmark can work with are refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from engine_service.config import EngineConfig
from tidemill.bench.bounds import Bounds, check_bounds
from tidemill.bench.engines import refuse_model
from tidemill.bench.stack import StackOptions, _stubs
from tidemill.bench.stack import run as run_stack
from tidemill.commands.bench import BENCHMARKS, run
from tidemill.runtime.errors import InvalidRequest


def numbers() -> Iterator[tuple[type, str, Bounds | None]]:
    """(options, field, its bounds) of all benchmarks; seeds may be anything."""
    for name, benchmark in BENCHMARKS.items():
        kind = getattr(import_module(f"tidemill.bench.{name}"), benchmark.options)
        for field, hint in get_type_hints(kind, include_extras=True).items():
            found = [one for one in (hint, *get_args(hint)) if get_origin(one) is Annotated]
            bounds = [b for one in found for b in one.__metadata__ if isinstance(b, Bounds)]
            is_number = {int, float} & {hint, *get_args(hint)}
            if bounds or (is_number and "seed" not in field):
                yield kind, field, next(iter(bounds), None)


NUMBERS = list(numbers())


def required_of(kind: Any) -> dict[str, str]:
    """Values for fields without a default, which are texts."""
    return {field.name: "demo" for field in fields(kind) if field.default is MISSING}


@pytest.mark.parametrize(
    ("kind", "field", "bounds"), NUMBERS, ids=[f"{k.__name__}.{f}" for k, f, _ in NUMBERS]
)
def test_every_number_has_bounds_and_they_hold(kind: type, field: str, bounds: Bounds) -> None:
    assert bounds is not None, "nobody says which numbers work"
    required = required_of(kind)
    for wrong in (bounds.least - 1, bounds.above, bounds.most + 1, float("nan"), float("inf")):
        if wrong != float("-inf"):
            with pytest.raises(InvalidRequest, match=f"^{field} is ") as refusal:
                check_bounds(kind(**required, **{field: wrong}))
            assert refusal.value.param == field


KINDS = list(dict.fromkeys(kind for kind, *_ in NUMBERS))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_control_defaults_and_the_last_numbers_inside_are_taken(kind: Any) -> None:
    required = required_of(kind)
    check_bounds(kind(**required))
    for _, field, bounds in (one for one in NUMBERS if one[0] is kind):
        assert bounds is not None
        for inside in (bounds.least, bounds.most):
            if abs(inside) != float("inf"):
                check_bounds(kind(**required, **{field: inside}))


def test_the_command_refuses_before_it_starts_anything() -> None:
    for argv in (["stack", "--requests=0"], ["throughput", "--repeats=0"], ["step", "--steps=0"]):
        began = time.monotonic()
        with pytest.raises(InvalidRequest, match="at least 1 works"):
            run(argv)
        assert time.monotonic() - began < 5.0


@pytest.fixture
def ended() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait(30)
        yield process


async def test_an_engine_that_has_ended_is_not_waited_for(ended: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the engine is not up"):
        async with _stubs(ended, 1):
            pass
    assert time.monotonic() - began < 20.0


def test_requests_that_the_engine_refuses_are_told_in_its_words() -> None:
    """They were counted as none at all."""
    with pytest.raises(InvalidRequest, match="maximum context length is 8192"):
        run_stack(StackOptions(requests=2, seconds=0.5, prompt_len=9000))


SETS = "--set=b1_128_256"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["throughput", "--temperature=1.5"], "temperature is for sets"),
        (["throughput", SETS, "--requests=3"], "requests is for equal requests"),
        (["throughput", SETS, "--against=none"], "against is for equal requests"),
        (["throughput", "--shape=qwen3-0.6b"], "pass --against none"),
        (["latency", SETS, "--concurrency=7"], "concurrency is for equal requests"),
        (["latency", SETS, "--output-len=7"], "output_len is for equal requests"),
        (["online", SETS, "--requests=7"], "requests is for equal requests"),
        (["throughput", SETS, "--shape=qwen3-0.6b", "--model=demo-block"], "leave --model out"),
        (
            ["latency", "--shape=qwen3-0.6b", "--load-format=safetensors"],
            "a shape has random weights; leave --load-format out",
        ),
        (["serve", "--shape=qwen3-0.6b", "--model=demo-block"], "leave --model out"),
    ],
)
def test_flags_that_would_not_count_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run(argv)


def test_control_a_shape_may_be_said_to_have_random_weights() -> None:
    refuse_model(EngineConfig(load_format="dummy"))
