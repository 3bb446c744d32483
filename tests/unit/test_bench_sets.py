"""Request sets, model shapes and bounds: pinned draws, and the bound against its own definition."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tidemill.bench.roofline import Bound, Ceilings, as_figures, bound, ceilings_of, read_work
from tidemill.bench.sets import SETS, RequestSet, fixed, mixed, request_sets
from tidemill.bench.shapes import SHAPES, read_shape, shape_folder
from tidemill.runtime.errors import InvalidRequest, NotFound

H200 = Ceilings(bytes_per_s=4.27e12, flop_per_s=803e12, source="test")

# A changed draw would make figures of different days incomparable, so the sets are pinned by value.
DIGESTS = {
    "mixed256": "2e72fde72369c1a1",
    "b1_128_256": "a32d0ba6338e28f3",
    "b1_512_512": "58f2d019a8419eb7",
    "b8_128_128": "bb90e2bb75834d8f",
    "b8_128_256": "fdfbe5848a29543a",
    "b32_128_256": "2f9b4c568edd3ead",
    "b128_128_256": "1ec9cc413e4ee74e",
    "b256_1024_128": "7681e363ec422110",
    "prefill64x2048": "769c8120e37edbd0",
    "long8x16384_64": "a9a117b99d975e09",
}


def digest(requests: RequestSet) -> str:
    rows = [*requests.prompts, requests.output_lens]
    packed = b"".join(struct.pack(f"<{len(row) + 1}I", len(row), *row) for row in rows)
    return hashlib.sha256(packed).hexdigest()[:16]


@pytest.mark.parametrize("name", SETS)
def test_sets_never_change(name: str) -> None:
    (requests,) = request_sets(name)
    assert digest(requests) == DIGESTS[name]
    assert requests.longest <= 20_480


def test_control_another_seed_is_another_set() -> None:
    assert digest(RequestSet("mixed256", *mixed(256, 100, 1024, 1))) != DIGESTS["mixed256"]


def test_sets_come_in_the_order_asked_for() -> None:
    assert [s.name for s in request_sets("b8_128_256, b1_128_256")] == ["b8_128_256", "b1_128_256"]
    with pytest.raises(InvalidRequest, match="unknown set 'mixed'"):
        request_sets("b1_128_256,mixed")


def test_set_fits_into_a_smaller_vocabulary(seed: int) -> None:
    requests = RequestSet("x", *fixed(3, 50, 2, seed))
    small = requests.within(97)
    assert all(0 <= token < 97 for prompt in small.prompts for token in prompt)
    assert (small.prompt_tokens, small.output_tokens) == (150, 6)
    assert requests.within(151_936) is requests


def test_shape_is_written_as_a_checkpoint_without_weights(tmp_path: Path) -> None:
    with shape_folder("qwen3-8b") as folder:
        assert json.loads((folder / "config.json").read_text()) == SHAPES["qwen3-8b"]
        special = json.loads((folder / "generation_config.json").read_text())
        assert special == {"bos_token_id": 151643, "eos_token_id": 151645}
        assert len(list(folder.iterdir())) == 2
    assert not folder.exists()
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 8}')
    assert read_shape(str(tmp_path)) == read_shape(str(config)) == {"hidden_size": 8}


@pytest.mark.parametrize(
    ("text", "error"), [("{", InvalidRequest), ("[]", InvalidRequest), (None, NotFound)]
)
def test_wrong_shapes_say_so(text: str | None, error: type[Exception], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error):
        read_shape(str(path))


def slow_bound(config: dict[str, Any], requests: RequestSet, ceilings: Ceilings) -> Bound:
    """Step by step, request by request."""
    work = read_work(config)
    assert work is not None
    weights = 2 * (work.body + work.head)
    flop = sum(
        2 * work.body * len(p) + work.score_flop * len(p) * len(p) / 2 + 2 * work.head
        for p in requests.prompts
    )
    prefill = max(flop / ceilings.flop_per_s, weights / ceilings.bytes_per_s)
    decode = 0.0
    for step in range(1, max(requests.output_lens)):
        lens = [
            len(prompt) + step
            for prompt, length in zip(requests.prompts, requests.output_lens, strict=True)
            if length > step
        ]
        moved = weights + work.kv_bytes * sum(lens)
        flop = weights * len(lens) + work.score_flop * sum(lens)
        decode += max(moved / ceilings.bytes_per_s, flop / ceilings.flop_per_s)
    return Bound(prefill_s=prefill, decode_s=decode)


def test_bound_is_its_definition(seed: int) -> None:
    for name, ceilings in (
        ("qwen3-0.6b", H200),
        ("qwen3-8b", Ceilings(bytes_per_s=9e15, flop_per_s=1e12, source="computes slowly")),
    ):
        requests = RequestSet("x", *mixed(12, 3, 90, seed))
        found = bound(read_shape(name), requests, ceilings)
        slow = slow_bound(read_shape(name), requests, ceilings)
        assert found is not None
        assert found.prefill_s == pytest.approx(slow.prefill_s)
        assert found.decode_s == pytest.approx(slow.decode_s)


@pytest.mark.parametrize(
    ("shape", "name", "gpus", "seconds"),
    [
        ("qwen3-0.6b", "mixed256", 1, 3.70),
        ("qwen3-0.6b", "b32_128_256", 1, 0.132),
        ("qwen3-8b", "mixed256", 1, 10.3),
        ("qwen3-8b", "prefill64x2048", 1, 2.37),
        ("qwen3-8b", "long8x16384_64", 1, 3.57),
        ("qwen3-32b", "b1_128_256", 4, 0.96),
    ],
)
def test_bounds_of_the_published_table(shape: str, name: str, gpus: int, seconds: float) -> None:
    found = bound(read_shape(shape), request_sets(name)[0], H200, gpus)
    assert found is not None
    assert found.total_s == pytest.approx(seconds, rel=6e-3)


def test_no_bound_where_nothing_is_known() -> None:
    (requests,) = request_sets("b1_128_256")
    assert bound(read_shape("qwen3-8b"), requests, None) is None
    assert bound({"architectures": ["SDARForCausalLM"]}, requests, H200) is None
    qwen, mistral = read_shape("qwen3-8b"), {"architectures": ["MistralForCausalLM"]}
    assert bound({**qwen, "sliding_window": 4096}, requests, H200) is not None  # it is off
    window = {"sliding_window": 4096, "use_sliding_window": True}
    assert bound({**qwen, **window}, requests, H200) is None
    del qwen["use_sliding_window"], qwen["sliding_window"]
    assert bound({**qwen, **mistral}, requests, H200) is not None
    assert bound({**qwen, **mistral, "sliding_window": 4096}, requests, H200) is None
    assert as_figures(None, 1.0)["bound_ratio"] is None
    assert as_figures(Bound(prefill_s=1.0, decode_s=2.0), 4.0)["bound_ratio"] == 0.75
    assert ceilings_of("cpu") is None
    assert ceilings_of("simulated") is None
