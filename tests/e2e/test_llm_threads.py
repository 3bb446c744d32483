"""One LLM that several threads call: each gets its own answers, and nothing is left of them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tidemill.llm import LLM
from tidemill.runtime.errors import InvalidRequest
from tidemill.sampling_params import SamplingParams

WAITS_S = 0.3


@pytest.fixture(scope="module", params=["demo", "demo-block"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(request.param, max_rows=4, max_model_len=256)


def answers(llm: LLM, number: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.8, seed=number, max_tokens=24)
    prompts = [f"add: {number}+{other}" for other in range(6)]
    return [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]


def test_everybody_gets_what_it_would_get_alone(llm: LLM) -> None:
    want = [answers(llm, number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(lambda number: answers(llm, number), range(8))) == want
    assert want[0] != want[1], "control: they differ"
    assert not llm._live
    assert not llm._requests
    llm.engine.scheduler.check_integrity()


def test_one_that_fails_hurts_nobody(llm: LLM) -> None:
    def fail(_: int) -> None:
        with pytest.raises(InvalidRequest):
            llm.generate(["fine", "x" * 9000], SamplingParams(max_tokens=8), use_tqdm=False)

    want = [answers(llm, number) for number in range(4)]
    with ThreadPoolExecutor(8) as pool:
        failing = [pool.submit(fail, number) for number in range(4)]
        assert list(pool.map(lambda number: answers(llm, number), range(4))) == want
        for one in failing:
            one.result()
    assert not llm._live
    assert not llm._requests


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False),
        lambda llm: llm.add_request("a", SamplingParams(max_tokens=2)),
        lambda llm: llm.step(),
    ],
    ids=["generate", "add_request", "step"],
)
def test_a_call_waits_for_that_of_another_thread(llm: LLM, call: Callable[[LLM], object]) -> None:
    """Held up, it has done nothing; and the thread that holds the turn may call."""
    thread = threading.Thread(target=call, args=[llm])
    with llm._turn:
        thread.start()
        thread.join(WAITS_S)
        assert thread.is_alive()
        assert not llm._live
        llm.generate("b", SamplingParams(max_tokens=2), use_tqdm=False)
        assert not llm._live
    thread.join(60.0)
    assert not thread.is_alive()
    while llm.has_unfinished_requests:
        llm.step()
    for request_id in list(llm._requests):
        llm.get_output(request_id)
