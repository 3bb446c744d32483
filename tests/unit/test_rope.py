"""Rotary frequencies equal transformers' bit for bit, in both spellings of config.json."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine_service.kernels.qk_rope_store import qk_rope_store_ref, qk_rope_store_triton
from engine_service.kernels.rotary import rotate, rotate_ref
from engine_service.layers.rope import (
    RotaryTable,
    inverse_frequencies,
    read_rope,
    scaled_max_len,
)
from tidemill.runtime.errors import InvalidRequest, Unsupported

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEAD_DIM = 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
SCALED = [
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    LLAMA3,
    LLAMA3 | {"factor": 32.0},
    YARN,
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    YARN | {"attention_factor": 0.75},
    YARN | {"factor": 0.5},
]


def old_style(rope: dict[str, Any]) -> dict[str, Any]:
    kind = {"type": rope["rope_type"]}
    rest = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": kind | rest}


@pytest.mark.parametrize("rope", SCALED, ids=lambda rope: rope["rope_type"])
def test_frequencies_and_factor_equal_transformers(rope: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=32768,
        rope_parameters=dict(rope),
    )
    want, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    sizes = {"max_position_embeddings": 32768}
    new = read_rope({**sizes, "rope_parameters": rope}, HEAD_DIM)
    assert torch.equal(inverse_frequencies(new), want)
    assert new.attention_factor == pytest.approx(factor, abs=0)
    assert read_rope({**sizes, **old_style(rope)}, HEAD_DIM) == new


def test_equal_bounds_are_a_step_and_no_division_by_zero() -> None:
    """Also of the first wave, 2 pi long, lying right on them, which was NaN; transformers' blend
    is the same of all waves that lie on none."""
    waves = 2 * torch.pi / inverse_frequencies(read_rope({"rope_theta": 5e5}, HEAD_DIM))
    for bound in (waves[0].item(), 1000.0):
        factor = LLAMA3["original_max_position_embeddings"] / bound
        rope = LLAMA3 | {"low_freq_factor": factor, "high_freq_factor": factor}
        got = inverse_frequencies(read_rope({"rope_parameters": rope}, HEAD_DIM))
        plain = 2 * torch.pi / waves
        torch.testing.assert_close(got, torch.where(waves > bound, plain / 8, plain))
        config = LlamaConfig(head_dim=HEAD_DIM, rope_parameters=rope)
        want, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
        assert torch.equal(got[1:], want[1:])


@pytest.mark.parametrize("rope", SCALED[:-2], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_frequencies_of_a_part_equal_transformers(rope: dict[str, Any], share: float) -> None:
    """As partial_rotary_factor beside or within the other parameters."""
    part = rope | {"partial_rotary_factor": share}
    config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=32768, rope_parameters=part)
    want, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    for spelling in (
        {"rope_parameters": part},
        {"rope_parameters": rope, "partial_rotary_factor": share},
    ):
        got = read_rope({"max_position_embeddings": 32768, **spelling}, HEAD_DIM, partial=True)
        assert got.rotary_dim == int(HEAD_DIM * share)
        assert torch.equal(inverse_frequencies(got), want)


@pytest.mark.parametrize("share", [0.0, -1, 0.51, 1.5])
def test_parts_that_cannot_turn_are_named(share: float) -> None:
    with pytest.raises(Unsupported, match="partial_rotary_factor") as caught:
        read_rope({"partial_rotary_factor": share}, 50, partial=True)
    assert caught.value.param == "partial_rotary_factor"


def test_default_frequencies_are_the_formula() -> None:
    rope = read_rope({"rope_theta": 1e6, "max_position_embeddings": 128}, HEAD_DIM)
    want = [1e6 ** (-index / HEAD_DIM) for index in range(0, HEAD_DIM, 2)]
    got = inverse_frequencies(rope)
    torch.testing.assert_close(
        got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert read_rope({"max_position_embeddings": 128}, HEAD_DIM).theta == 10000.0


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor"])
def test_a_fact_in_two_places_is_one(place: str, key: str) -> None:
    """One of two values was ignored, be it the one that an operator said over config.json."""
    said = {place: {"rope_type": "linear", "factor": 2.0, key: 0.5 if key != "rope_theta" else 5e3}}
    want = read_rope({**said, "max_position_embeddings": 64}, HEAD_DIM, partial=True)
    same = {**said, key: said[place][key], "max_position_embeddings": 64}
    assert read_rope(same, HEAD_DIM, partial=True) == want
    with pytest.raises(InvalidRequest, match=f"{key} 0.25 .* are two; leave one") as caught:
        read_rope({**same, key: 0.25}, HEAD_DIM, partial=True)
    assert caught.value.param == key


def test_parameters_nested_by_layer_type_must_agree() -> None:
    one = {"rope_type": "default", "rope_theta": 5000.0}
    both = {"full_attention": one, "sliding_attention": dict(one)}
    assert read_rope({"rope_parameters": both}, HEAD_DIM).theta == 5000.0
    both["sliding_attention"]["rope_theta"] = 10.0
    with pytest.raises(Unsupported, match="sliding_attention"):
        read_rope({"rope_parameters": both}, HEAD_DIM)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "longrope"),
        ({"type": "mrope", "mrope_section": [1]}, "mrope"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**YARN, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 4.0}, "beta_fast"),
    ],
)
def test_unknown_scalings_are_refused(raw: dict[str, Any], named: str) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(Unsupported, match=named):
            read_rope({key: raw, "max_position_embeddings": 64}, HEAD_DIM)


def test_neutral_keys_are_accepted() -> None:
    raw = {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 1.0,
        "factor": None,
    }
    assert read_rope({"rope_parameters": raw}, HEAD_DIM).kind == "default"


def test_missing_parameters_are_named() -> None:
    raw = {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"}
    with pytest.raises(InvalidRequest, match="low_freq_factor"):
        read_rope({"rope_parameters": raw, "max_position_embeddings": 64}, HEAD_DIM)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "factor must be a number above 0, found 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "twice"}}, "factor"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": -4}}, "original_max"),
        ({"rope_scaling": {**YARN, "attention_factor": "x"}}, "attention_factor"),
        ({"rope_theta": -5}, "rope_theta must be a number above 1, found -5"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": 10**400}, r"rope_theta must be a number in \[1e-38, 1e\+38\]"),
        ({"rope_theta": 1e300}, "rope_theta must be a number in"),
        ({"rope_scaling": {**YARN, "factor": 10**400}}, "factor must be a number in"),
        ({"rope_scaling": {**YARN, "beta_fast": 1e-320}}, "beta_fast must be a number in"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings must be a number in"),
        ({"max_position_embeddings": 0.5}, "max_position_embeddings must be .* at least 1"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2}, "max_position_embeddings": None},
            "needs original_max_position_embeddings",
        ),
        ({"partial_rotary_factor": 10**400}, "partial_rotary_factor must be a number above 0"),
        ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor"),
        ({"partial_rotary_factor": float("inf")}, "partial_rotary_factor"),
        ({"partial_rotary_factor": True}, "partial_rotary_factor"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor must be a number above 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_numbers_that_no_angle_comes_of_are_named(said: dict[str, Any], named: str) -> None:
    """Some ended in a ValueError of Python's, others in a model that starts and computes NaN."""
    with pytest.raises(InvalidRequest, match=named):
        read_rope({"max_position_embeddings": 64, **said}, HEAD_DIM, partial=True)


@pytest.mark.parametrize(
    ("rope", "max_len", "scaled"),
    [
        ({"rope_type": "default"}, 4096, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 4096, 16384),
        (LLAMA3, 131072, 131072),
        (YARN, 32768, 131072),
        (YARN, 131072, 131072),
    ],
)
def test_longest_context(rope: dict[str, Any], max_len: int, scaled: int) -> None:
    config = {"rope_parameters": rope, "max_position_embeddings": max_len}
    assert scaled_max_len(read_rope(config, HEAD_DIM), max_len) == scaled


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotation_equals_its_reference(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    rope = read_rope({"rope_parameters": YARN, "max_position_embeddings": 64}, HEAD_DIM)
    positions = torch.randint(0, 1 << 17, (9,))
    x = torch.randn(9, 3, HEAD_DIM).to(dtype)
    table = RotaryTable(rope, device=torch.device("cpu"))
    angles = positions.float()[:, None] * inverse_frequencies(rope)
    cos, sin = (
        torch.cat((part, part), dim=-1).to(dtype)
        for part in (angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor)
    )
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    got = rotate(x, *table(positions, dtype))
    torch.testing.assert_close(got, rotate_ref(x, cos, sin), rtol=tolerance, atol=tolerance)
    assert not torch.allclose(got, rotate(x, *table(positions + 1, dtype)), atol=0.05)


def tables(rotary_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rope = read_rope({"partial_rotary_factor": rotary_dim / HEAD_DIM}, HEAD_DIM, partial=True)
    return RotaryTable(rope, device=DEVICE)(torch.arange(1, 8, device=DEVICE) * 3, dtype)


@pytest.mark.parametrize("rotary_dim", [2, 16, 32, 48, 64])
def test_a_part_of_every_head_turns(rotary_dim: int, seed: int) -> None:
    """The leading features turn among themselves, the others stay bit for bit."""
    torch.manual_seed(seed)
    x = torch.randn(7, 3, HEAD_DIM, device=DEVICE)
    cos, sin = tables(rotary_dim, x.dtype)
    got = rotate(x, cos, sin)
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    c, s = cos[..., : rotary_dim // 2], sin[..., rotary_dim // 2 :]
    want = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    torch.testing.assert_close(got[..., :rotary_dim], want, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    assert not torch.allclose(got[..., :rotary_dim], x[..., :rotary_dim], atol=1e-3)


@pytest.mark.parametrize("rotary_dim", [24, 32])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_the_kernel_turns_a_part(
    rotary_dim: int, normed: bool, dtype: torch.dtype, tolerance: float, seed: int
) -> None:
    """Queries, stored keys and values equal the plain operators; what stays is not touched."""
    torch.manual_seed(seed)
    cos, sin = tables(rotary_dim, dtype)
    qkv = torch.randn(7, 8 * HEAD_DIM, device=DEVICE).to(dtype)
    pages = torch.full((3, 4, 2, HEAD_DIM), 77.0, dtype=dtype, device=DEVICE)
    options: dict[str, Any] = {
        "norm_weight": torch.randn(6, HEAD_DIM, device=DEVICE).to(dtype) if normed else None,
        "eps": 1e-5,
        "slots": torch.randperm(12, device=DEVICE)[:7],
        "num_heads": 4,
    }
    own = [{"k_pages": pages.clone(), "v_pages": pages.clone()} for _ in range(2)]
    want = qk_rope_store_ref(qkv.clone(), cos, sin, **own[0], **options)
    got = qk_rope_store_triton(qkv.clone(), cos, sin, **own[1], **options)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    k, want_k = own[1]["k_pages"], own[0]["k_pages"]
    torch.testing.assert_close(k, want_k, rtol=tolerance, atol=tolerance)
    assert torch.equal(own[1]["v_pages"], own[0]["v_pages"])
    if not normed:
        kept = qkv.view(7, 8, HEAD_DIM)[:, :4, rotary_dim:]
        assert torch.equal(got[..., rotary_dim:], kept)
    whole = qk_rope_store_triton(qkv.clone(), *tables(HEAD_DIM, dtype), **own[1], **options)
    assert not torch.allclose(whole, want, atol=0.05), "negative control"
