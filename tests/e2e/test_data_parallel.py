"""`--data-parallel-size`: several engines of one command as a user runs them. Load goes to all,
tokens are those of one engine, and what kills one engine does not hurt the others."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from tests.certificates import Authority
from tests.e2e.real_stack import START_S
from tests.e2e.test_serve import ANY_PORTS, Served, assert_gone, free_ports, serve
from tests.slow.fleets import Client, Stream, prompts, right_answers
from tests.waiting import PATIENCE_S, eventually, free_port, stopwatch, until
from tidemill import LLM, SamplingParams

TWO = "--data-parallel-size=2"
SIMULATED = ("demo", "--executor=simulated", "--simulated-step-ms=20", "--max-rows=2")
SEEDS = range(1, 9)
PROMPTS = ("The king", "add: 1+2 =", "reverse: harbour")
NUM_TOKENS = 12
DRAINED = 300
"""Tokens of a stream that has begun and has long to go when its engine is told to end, however
late this process looks."""
OK, GONE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
Clock = Callable[[], float]


def url_of(served: Served) -> str:
    found = re.search(r"HTTP +(\S+)/v1", served.out)
    assert found is not None
    return found[1]


def engines_of(served: Served) -> list[str]:
    """Addresses, as the Ready block says them."""
    found = re.search(r"engine  (.*)", served.out)
    assert found is not None
    return found[1].split(", ")


def servers_of(served: Served) -> dict[str, int]:
    """The pid of every engine server by its address."""
    found, parent = {}, served.process.pid
    for text in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        words = Path(f"/proc/{text}/cmdline").read_bytes().decode().split("\0")
        if "engine_service" in words:
            port = next(word for word in words if word.startswith("--engine-port="))
            found[f"127.0.0.1:{port.partition('=')[2]}"] = int(text)
    return found


def tree_of(served: Served) -> dict[str, int]:
    """Every process below, each under a name of its own."""
    found, parents = dict[str, int](), [served.process.pid]
    while parents:
        parent = parents.pop()
        for text in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            found[f"{Path(f'/proc/{text}/cmdline').read_text()} {text}"] = int(text)
            parents.append(int(text))
    return found


def metric(served: Served, name: str) -> dict[str, float]:
    """A metric of the frontend by the engine that it is of."""
    text = httpx.get(f"{url_of(served)}/metrics", timeout=PATIENCE_S).text
    lines = re.findall(rf'^{name}{{engine="([^"]+)"}} (\S+)$', text, re.MULTILINE)
    return {engine: float(value) for engine, value in lines}


def wait_all_up(served: Served) -> None:
    """Until every engine gets requests: the frontend is ready when it has one of them."""
    served.wait_ready()
    up = "tidemill_fleet_up"
    eventually(lambda: set(metric(served, up).values()) == {1.0}, "one gets nothing", START_S)


async def sampled(url: str) -> dict[tuple[str, int], list[int]]:
    """The tokens of every prompt with every seed, all asked at once."""

    async def one(prompt: str, seed: int) -> list[int]:
        body = {"prompt": prompt, "seed": seed, "temperature": 1.0, "max_tokens": NUM_TOKENS}
        body |= {"ignore_eos": True, "return_token_ids": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    keys = [(prompt, seed) for prompt in PROMPTS for seed in SEEDS]
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        found = await asyncio.gather(*(one(*key) for key in keys))
    return dict(zip(keys, found, strict=True))


def of_one_engine() -> dict[tuple[str, int], list[int]]:
    """The same of one engine, one request after the other."""
    llm = LLM("demo", device="cpu", dtype="float32")
    found = {}
    for prompt in PROMPTS:
        for seed in SEEDS:
            asked = SamplingParams(
                seed=seed, temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True
            )
            (output,) = llm.generate(prompt, asked, use_tqdm=False)
            found[prompt, seed] = list(output.outputs[0].token_ids)
    return found


async def test_two_engines_share_the_load_and_say_what_one_says(tmp_path: Path) -> None:
    ports = ("--http-port=0", "--grpc-port=0", f"--engine-port={free_port(neighbours=2)}")
    with serve(tmp_path, "demo", "--device=cpu", "--dtype=float32", TWO, *ports) as served:
        wait_all_up(served)
        first, second = engines_of(served)
        numbers = [int(one.rpartition(":")[2]) for one in (first, second)]
        assert numbers[1] == numbers[0] + 1
        assert servers_of(served).keys() == {first, second}
        assert "128 requests at a time" in served.out

        got = await sampled(url_of(served))
        routed = metric(served, "tidemill_fleet_requests_routed_total")
        assert routed.keys() == {first, second}
        assert sum(routed.values()) == len(got)
        assert min(routed.values()) >= len(got) / 4, "one of them has hardly anything to do"
        assert metric(served, "tidemill_fleet_up") == {first: 1.0, second: 1.0}

        lines = [json.loads(line) for line in served.err.splitlines()]
        ready = [one["engine"] for one in lines if str(one["message"]).startswith("ready")]
        assert sorted(ready) == sorted((first, second)), "whose line it is cannot be seen"

        alone = of_one_engine()
        assert got == alone
        moved = {(prompt, seed): got[prompt, seed % 8 + 1] for prompt, seed in got}
        assert moved != alone, "control: seeds make no difference"

        children = tree_of(served)
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_end() == 0, served.err
        assert_gone(children)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Served]:
    """Two simulated engines of two rows each."""
    with serve(tmp_path, *SIMULATED, TWO, *free_ports(num_engines=2)) as served:
        wait_all_up(served)
        yield served


@pytest.fixture
def awake_s() -> Iterator[Clock]:
    with stopwatch() as read:
        yield read


async def blown(served: Served, victim: str | None, length: int, awake_s: Clock) -> list[Stream]:
    """Eight streams over four rows; when the first ones have begun, the engine `victim` is killed:
    `length` is such that they have not ended by then. All their tokens are right."""
    address = re.search(r"gRPC +\S+:(\d+)", served.out)
    assert address is not None
    asked = prompts(8)
    async with Client(int(address[1]), awake_s) as client:
        streams = [Stream(prompt, length) for prompt in asked]
        tasks = [asyncio.create_task(client.run(one)) for one in streams]
        if victim is not None:
            await until(lambda: sum(len(one.tokens) >= 3 for one in streams) >= 4)
            os.kill(servers_of(served)[victim], signal.SIGKILL)
        at = awake_s()
        await asyncio.gather(*tasks)
    for stream, tokens in zip(streams, right_answers(asked, length), strict=True):
        stream.check(tokens)
    cut = [one for one in streams if one.code is not OK]
    assert all(one.ended - at < 5.0 for one in cut)
    return streams


async def test_one_of_two_is_killed_under_load_and_comes_back(pair: Served, awake_s: Clock) -> None:
    victim, other = engines_of(pair)
    before = servers_of(pair)
    streams = await blown(pair, victim, 250, awake_s)
    cut = [one for one in streams if one.code is not OK]
    assert [one.code for one in cut] == [GONE] * 2, "the streams that had begun there, and no other"
    assert all(one.tokens for one in cut), "one without a token was not moved"
    assert metric(pair, "tidemill_fleet_retries_total")[victim] >= 2

    eventually(lambda: "serves again" in pair.err, "it does not come back", START_S)
    told = f"engine {victim} was killed by SIGKILL; the others serve, it starts again"
    assert f"tidemill serve: {told}" in pair.err
    eventually(lambda: metric(pair, "tidemill_fleet_up")[victim] == 1, "it gets nothing", START_S)
    after = servers_of(pair)
    assert after[other] == before[other]
    assert after[victim] != before[victim]
    had = metric(pair, "tidemill_fleet_requests_routed_total")
    whole = await blown(pair, None, 20, awake_s)
    assert {one.code for one in whole} == {OK}, "control: nobody is killed"
    has = metric(pair, "tidemill_fleet_requests_routed_total")
    assert all(has[one] > had[one] for one in (victim, other))

    children = tree_of(pair)
    streams, had = await asked_to_end(pair, 1)
    assert had < DRAINED / 2, "control: there is something left to drain"
    assert [(one.code, len(one.tokens)) for one in streams] == [(OK, DRAINED)] * 4, "both drain"
    assert_gone(children)


async def asked_to_end(served: Served, times: int) -> tuple[list[Stream], int]:
    """Four streams of 300 steps that have all begun, on both engines, when the command gets so many
    SIGINTs, and how far the last of them was by then. The command ends with status 0."""
    address = re.search(r"gRPC +\S+:(\d+)", served.out)
    assert address is not None
    streams = [Stream(prompt, DRAINED) for prompt in prompts(4)]
    async with Client(int(address[1])) as client:
        tasks = [asyncio.create_task(client.run(one)) for one in streams]
        await until(lambda: all(one.tokens for one in streams))
        had = min(len(one.tokens) for one in streams)
        served.process.send_signal(signal.SIGINT)
        for _ in range(1, times):
            await until(lambda: '"draining"' in served.err)  # two that wait together are one
            served.process.send_signal(signal.SIGINT)
        await asyncio.gather(*tasks)
    assert await asyncio.to_thread(served.wait_end) == 0, served.err
    return streams, had


@pytest.mark.slow
async def test_asked_twice_nobody_drains(pair: Served) -> None:
    children = tree_of(pair)
    streams, _ = await asked_to_end(pair, 2)
    assert {one.code for one in streams} == {GONE}
    assert_gone(children)


@pytest.mark.slow
def test_nothing_outlives_a_killed_supervisor_of_two(pair: Served) -> None:
    children = tree_of(pair)
    assert sum("engine_service" in name for name in children) == 4
    pair.process.kill()
    assert_gone(children)


@pytest.mark.parametrize("is_mtls", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_engines_alone_are_watched_too(tmp_path: Path, is_mtls: bool) -> None:
    """`tidemill engine`: one comes back while the other serves; SIGTERM ends both, and so does the
    death of the last one."""
    flags = [f"--{name}-port={free_port(neighbours=2)}" for name in ("engine", "metrics")]
    if is_mtls:
        authority = Authority(tmp_path / "certificates", "ca")
        pair = authority.sign("server")
        flags += [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"]
        flags.append(f"--tls-client-ca={authority.path}")
    with serve(tmp_path, *SIMULATED, TWO, *flags, verb="engine") as served:
        eventually(lambda: "all 2 engines serve: " in served.err, "they do not start", START_S)
        victim, other = servers_of(served)
        os.kill(servers_of(served)[victim], signal.SIGKILL)
        again = f"tidemill engine: engine {victim} serves again"
        eventually(lambda: again in served.err, "it does not come back", START_S)
        assert servers_of(served).keys() == {victim, other}
        children = tree_of(served)
        assert not any("frontend" in name for name in children)
        if is_mtls:
            served.process.send_signal(signal.SIGTERM)
            assert served.wait_end() == 0
        else:
            for pid in servers_of(served).values():
                os.kill(pid, signal.SIGKILL)
            assert served.wait_end() == 1
            assert re.search(r"engine: engine \S+ was killed by SIGKILL$", served.err, re.MULTILINE)
        assert_gone(children)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--device=cuda",), "needs 2 GPUs; there are 0: no engine fits, or --device cpu"),
        (("--device=cpu", "--engine-port=65535"), "engine 1 .* would get 65536: the last port is"),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_starts(
    tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    with serve(tmp_path, "demo", TWO, *ANY_PORTS, *flags) as served:
        assert served.wait_end() == 1
        assert re.search(f"tidemill serve: .*{words}", served.err), served.err
        assert "loading" not in served.err
