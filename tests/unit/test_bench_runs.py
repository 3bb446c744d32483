"""Benchmarks that drive an engine, here a simulated one: what they count is what happened."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine_service.config import EngineConfig
from engine_service.core.messages import StepOutput
from engine_service.kernels import mailed_sum, peer_sum, pushed_sum, rounds_sum
from tidemill.bench import batching, kernels, latency, step, throughput
from tidemill.bench.engines import open_engine
from tidemill.bench.probe import Arrivals, counted, replaced, timed, watch_kv
from tidemill.bench.roofline import Ceilings
from tidemill.bench.sets import RequestSet
from tidemill.commands import bench
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.sampling_params import SamplingParams

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 997,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "eos_token_id": 2,
}

CEILINGS = Ceilings(bytes_per_s=1e12, flop_per_s=1e14, source="made up")


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


def simulated(step_ms: float = 0.0, **flags: Any) -> EngineConfig:
    return EngineConfig(executor="simulated", simulated_step_ms=step_ms, page_size=64, **flags)


def test_throughput_counts_the_tokens_of_its_sets(shape: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    flags = ["--executor=simulated", "--simulated-step-ms=0", "--page-size=64", f"--json={file}"]
    argv = ["throughput", f"--shape={shape}", "--set=b1_128_256,b8_128_256", *flags]
    assert bench.run(argv) == 0
    found = json.loads(file.read_text())
    assert {"commit", "gpu", "packages", "tidemill", "start_s"} <= found.keys()
    assert (found["benchmark"], found["shape"], found["page_size"]) == ("throughput", shape, 64)
    assert found["max_model_len"] == 384
    for row, requests in zip(found["sets"], (1, 8), strict=True):
        assert (row["prompt_tokens"], row["output_tokens"]) == (128 * requests, 256 * requests)
        assert len(row["all_seconds"]) == 2
        assert row["seconds"] == min(row["all_seconds"])
        assert row["output_tokens_per_s"] == pytest.approx(
            256 * requests / row["seconds"], rel=0.05
        )
        assert row["bound_s"] is None
        # A forward for the prompt, which gives the first token, and one for every further token.
        assert (row["forwards_per_request"], row["tokens_per_forward"]) == (256, 1)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143), RuntimeError("no more")])
def test_sets_that_were_measured_are_kept(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    """Whatever ends the run behind them. It ends as it would have ended all the same."""
    measure, file = throughput._measure, tmp_path / "figures.json"

    def measured(options: Any, llm: Any, requests: RequestSet) -> dict[str, Any]:
        if requests.name != "b1_128_256":
            raise end
        return measure(options, llm, requests)

    monkeypatch.setattr(throughput, "_measure", measured)
    flags = ["--executor=simulated", "--simulated-step-ms=0", "--page-size=64", f"--json={file}"]
    for names, kept in (("b1_128_256,b8_128_256", True), ("b8_128_256,b1_128_256", False)):
        with pytest.raises(type(end)) as raised:
            bench.run(["throughput", f"--shape={shape}", f"--set={names}", *flags])
        assert raised.value is end
        assert file.exists() is kept
        if kept:
            found = json.loads(file.read_text())
            assert [row["set"] for row in found["sets"]] == ["b1_128_256"]
            assert found["ended_early"] == (str(end) or "KeyboardInterrupt")
            file.unlink()


def test_throughput_without_sets_compares_equal_requests(shape: str) -> None:
    options = throughput.ThroughputOptions(
        shape=shape, requests=3, input_len=5, output_len=7, repeats=2, against="none"
    )
    found = throughput.run(options, simulated())
    assert len(found["seconds"]["tidemill"]) == 2
    assert "ratio_to_peer" not in found
    assert found["max_rows"] == 3


def test_missing_tokens_are_an_error(shape: str) -> None:
    with open_engine(simulated(), shape, longest=40) as engine:
        requests = RequestSet("short", [[1, 2]], [9])
        params = [SamplingParams(max_tokens=8, ignore_eos=True)]
        with pytest.raises(RuntimeError, match="8 tokens instead of 9"):
            throughput._time(engine.llm, requests, params)


def test_kv_use_is_that_of_the_pages(shape: str) -> None:
    """One request of 128 + 256 tokens in pages of 64: full pages but the last."""
    with open_engine(simulated(), shape, longest=384) as engine:
        params = SamplingParams(max_tokens=256, ignore_eos=True)
        with watch_kv(engine.llm.engine) as use:
            engine.llm.generate([[5] * 128], params, use_tqdm=False)
    held = range(128, 384)
    wanted = sum(held) / sum(-(-n // 64) * 64 for n in held)
    assert use.share == pytest.approx(wanted, abs=0.01)


def test_latency_of_simulated_steps(shape: str) -> None:
    options = latency.LatencyOptions(
        shape=shape, concurrency="1,4", rounds=2, input_len=4, output_len=10
    )
    found = latency.run(options, simulated(step_ms=3.0))
    assert [(case["concurrency"], case["requests"]) for case in found["cases"]] == [(1, 2), (4, 8)]
    for case in found["cases"]:
        # A decoding step takes as long as the executor says; the first token takes one at least.
        assert case["inter_token_ms"]["p50"] == pytest.approx(3.0, abs=1.5)
        assert case["first_token_ms"]["p50"] >= 2.9
        assert case["request_ms"]["mean"] >= 9 * 2.9
    with pytest.raises(InvalidRequest, match="'x' is not a number"):
        latency.run(latency.LatencyOptions(concurrency="1,x"), EngineConfig())


def test_requests_that_wait_for_a_row_are_told_of(
    shape: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "_ROWS", 3)
    options = latency.LatencyOptions(
        shape=shape, concurrency="4", rounds=1, input_len=4, output_len=2
    )
    assert latency.run(options, simulated())["max_rows"] == 3
    assert "4 requests are alive at a time and 3 of them have a row" in capsys.readouterr().err
    assert latency.run(options, simulated(max_rows=4))["max_rows"] == 4
    assert "have a row" not in capsys.readouterr().err, "the control"


def test_gaps_are_between_outputs_that_hold_tokens() -> None:
    def output(keys: list[int], counts: list[int]) -> StepOutput:
        return SimpleNamespace(keys=keys, counts=counts)  # type: ignore[return-value]

    arrivals = Arrivals(
        submitted={1: 10.0, 2: 10.5},
        outputs=[
            (11.0, output([1, 2], [1, 0])),
            (11.5, output([1, 2], [4, 1])),
            (13.0, output([2, 1], [1, 0])),
        ],
    )
    assert arrivals.token_times() == {1: [11.0, 11.5], 2: [11.5, 13.0]}
    found = latency.summarize(arrivals)
    assert found["first_token_ms"]["mean"] == 1000.0
    assert (found["inter_token_ms"]["p50"], found["inter_token_ms"]["max"]) == (500.0, 1500.0)


def test_percentiles_are_values_that_occurred() -> None:
    found = latency.percentiles([n / 1000 for n in range(100, 0, -1)])
    assert found == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert latency.percentiles([]) is None
    assert latency.percentiles([0.007]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 7.0)


def test_batching_counts_the_steps_of_both(shape: str) -> None:
    options = batching.BatchingOptions(
        shape=shape, seats="4", input_len=8, shortest=2, longest=64, kv_set="b8_128_256"
    )
    found = batching.run(options, simulated())
    (row,) = found["seats"]
    lens = batching.draw(options, 4).output_lens
    groups = [max(lens[at : at + 4]) for at in range(0, 32, 4)]
    # A group takes one step a token, and the seats are full to the end of the last long request.
    assert sum(groups) <= row["static_steps"] <= sum(groups) + 2 * len(groups)
    assert sum(lens) / 4 <= row["continuous_steps"] < row["static_steps"] / 1.2
    assert row["output_tokens"] == sum(lens)
    assert found["kv"][0]["kv_slots_used"] == pytest.approx(0.9, abs=0.1)


def test_control_equal_lengths_gain_nothing(shape: str) -> None:
    options = batching.BatchingOptions(
        shape=shape, seats="4", input_len=8, shortest=16, longest=16, kv_set="none"
    )
    (row,) = batching.run(options, simulated())["seats"]
    assert row["continuous_steps"] >= row["static_steps"] * 0.8


def test_output_lengths_are_log_uniform() -> None:
    lens = batching.draw(batching.BatchingOptions(input_len=1), 64).output_lens
    assert len(lens) == 512
    assert 16 <= min(lens) <= max(lens) <= 1024
    below = sum(length < 128 for length in lens) / 512
    assert below == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("wrong", [{"seats": "8,x"}, {"seats": "0"}, {"shortest": 9, "longest": 8}])
def test_wrong_batches_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        batching.run(batching.BatchingOptions(**wrong), EngineConfig())


def test_phases_of_a_step_add_up(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = step.StepOptions(shape=shape, rows=5, context=300, steps=20, profile=True)
    found = step.run(options, simulated(step_ms=3.0))
    phases = found["phases_ms"]
    assert phases["step"] == pytest.approx(3.0, abs=1.5)
    assert phases["wait"] > phases["schedule"] + phases["apply"] + phases["emit"]
    parts = sum(value for name, value in phases.items() if name != "step")
    assert parts == pytest.approx(phases["step"], rel=0.3)
    assert found["device"] is None
    assert "no CUDA device, so no kernels to profile" in capsys.readouterr().err
    assert 300 <= found["mean_context"] <= 330


def test_steps_that_decide_blocks_need_longer_requests() -> None:
    options = step.StepOptions(rows=2, context=16, steps=6)
    config = EngineConfig(model="demo-block", executor="simulated", simulated_step_ms=0.0)
    with pytest.raises(InvalidRequest, match="--tokens-per-step"):
        step.run(options, config)
    longer = step.StepOptions(rows=2, context=16, steps=6, tokens_per_step=16)
    assert step.run(longer, config)["phases_ms"]["step"] > 0


def test_rows_that_cannot_decode_together_are_refused(shape: str) -> None:
    """They were told to have ended, and blocks of diffusion blamed for it."""
    options = step.StepOptions(shape=shape, rows=3, context=16, steps=2)
    with pytest.raises(InvalidRequest, match=r"3 rows .* in 2: leave --max-rows out"):
        step.run(options, simulated(max_rows=2))


def test_kernel_names_are_shortened() -> None:
    long = "void at::native::(anonymous namespace)::softmax<4, float>(float*, int)"
    assert step.short_name(long) == "at::native::softmax"
    assert step.short_name("_rms_norm_kernel") == "_rms_norm_kernel"
    assert step.short_name("Memcpy DtoH (Device -> Pinned)") == "Memcpy DtoH"


def test_collectives_have_a_share_of_their_own() -> None:
    """Of two ranks, by the names that the profiler tells."""
    library = step.short_name("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    spent = {library: 1.0, peer_sum._add_parts_kernel.__name__: 0.5, "_rms_norm_kernel": 2.5}
    assert step.collective_time(spent) == 1.5
    device = {"kernel_ms": 4.0, "collective_ms": 1.5, "kernels": []}
    lines = step.table({"phases_ms": {"step": 5.0}, "device": device})
    assert ("collectives", "    1.500 ms of it, 37.5%") in lines
    alone = device | {"collective_ms": 0.0}
    assert all(name != "collectives" for name, _ in step.table({"phases_ms": {}, "device": alone}))


@pytest.mark.parametrize("sums", [mailed_sum, peer_sum, pushed_sum, rounds_sum])
def test_all_kernels_in_which_ranks_wait_are_collectives(sums: ModuleType) -> None:
    names = [name for name in vars(sums) if name.endswith("_kernel")]
    assert names
    assert step.collective_time(dict.fromkeys(names, 1.0)) == len(names)


class Clock:
    def tick(self) -> str:
        time.sleep(0.002)
        return "tock"


def test_watched_methods_are_put_back() -> None:
    clock, spent = Clock(), [0.0]
    with timed(clock, "tick", spent), counted(clock, "tick") as calls:
        began = time.perf_counter()
        assert clock.tick() == clock.tick() == "tock"
        both_s = time.perf_counter() - began
    clock.tick()
    assert len(calls) == 2
    assert 0.004 <= spent[0] <= both_s
    assert not vars(clock)
    with replaced(clock, "tick", lambda _: lambda: "cuckoo"):
        assert clock.tick() == "cuckoo"
        with replaced(clock, "tick", lambda call: lambda: call() + "!"):
            assert clock.tick() == "cuckoo!"
        assert clock.tick() == "cuckoo"
    assert clock.tick() == "tock"


def test_kernels_need_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(Unsupported, match="needs a CUDA device"):
        bench.run(["kernels"])


def test_a_name_that_no_kernel_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended well, without a line."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(kernels, "ceilings_of", lambda device: CEILINGS)
    for cases in ("kernel_cases", "attention_cases", "choice_cases", "mixture_cases"):
        monkeypatch.setattr(f"tidemill.bench.{cases}.cases", lambda *_: iter(()))
    monkeypatch.setattr("engine_service.kernels.jit.HAS_TRITON", True)
    monkeypatch.setattr("engine_service.kernels.jit.INTERPRETED", False)
    with pytest.raises(InvalidRequest, match="no kernel's name contains 'rmsnorm'"):
        kernels.run(kernels.KernelsOptions(only="rmsnorm"))


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_every_benchmark_explains_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.run([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert ("--max-rows" in text) == bench.BENCHMARKS[name].takes_engine
    assert "--engine-port" not in text
