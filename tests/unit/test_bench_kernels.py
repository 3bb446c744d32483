"""What the kernels are measured against: the eager formulas are right, and so are the figures."""

from __future__ import annotations

import pytest
import torch

from engine_service.attention.base import AttentionShape
from engine_service.attention.reference import ReferenceBackend
from engine_service.core.step import FULL
from engine_service.kernels.group_choice import GroupRule
from engine_service.kernels.grouped_linear import mix_experts_ref
from engine_service.kernels.likely_choice import SoftmaxRule
from engine_service.kernels.qk_rope_store import qk_rope_store_ref
from engine_service.kernels.rotary import rotary_angles_ref
from engine_service.sampling.filters import keep_likely
from tests.sampling_batches import Row
from tests.sampling_batches import make_batch as make_choices
from tidemill.bench import mixture_cases
from tidemill.bench.attention_cases import Load, eager_attention, make_batch
from tidemill.bench.choice_cases import eager_draw_filtered
from tidemill.bench.kernel_cases import eager_qk_rope_store
from tidemill.bench.kernels import rates
from tidemill.bench.mixture_cases import Mixture, eager_mix_experts
from tidemill.bench.roofline import Ceilings

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "load",
    [
        Load("causal", 3, 20, 20, 1),
        Load("half", 2, 7, 20, 1),
        Load("decode", 4, 1, 33, 1),
        Load("block", 2, 12, 24, 4),
        Load("all", 2, 8, 24, FULL),
    ],
    ids=lambda load: load.name,
)
def test_eager_attention_is_what_a_backend_computes(load: Load, seed: int) -> None:
    torch.manual_seed(seed)
    heads, kv_heads, head_dim, page_size = 6, 2, 8, 4
    shape = AttentionShape(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, page_size=page_size,
        dtype=torch.float32,
    )  # fmt: skip
    backend, batch = ReferenceBackend(shape), make_batch(load, page_size, CPU)
    cache = backend.empty_cache(int(batch.page_table.max()) + 1, CPU)
    cache.k.normal_(), cache.v.normal_()
    q = torch.randn(load.spans * load.queries, heads, head_dim)
    got = backend.attend(q, cache=cache, plan=backend.plan(batch, window=None), scale=0.3)
    pages = batch.page_table.long()
    k, v = (x[pages].flatten(1, 2)[:, : load.keys].transpose(1, 2) for x in (cache.k, cache.v))
    positions = torch.arange(load.keys - load.queries, load.keys)[:, None]
    seen = (positions // load.mask_block + 1) * load.mask_block
    bias = torch.zeros(load.queries, load.keys)
    bias[torch.arange(load.keys) >= seen] = torch.finfo(torch.float32).min
    stacked = q.view(load.spans, load.queries, heads, head_dim).transpose(1, 2)
    want = eager_attention(stacked, k, v, bias, 0.3).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(got, want)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, want.roll(1, dims=1))


def test_work_of_a_load_is_counted_query_by_query() -> None:
    causal = Load("causal", 2, 3, 5, 1)
    assert causal.flop == 4 * 32 * 128 * 2 * (3 + 4 + 5)
    assert Load("block", 1, 4, 8, 4).flop == 4 * 32 * 128 * 4 * 8
    assert Load("all", 1, 2, 5, FULL).flop == 4 * 32 * 128 * 2 * 5
    assert causal.kv_bytes(2) == 2 * 2 * 5 * 8 * 128 * 2


def test_eager_rotation_is_the_kernels(seed: int) -> None:
    torch.manual_seed(seed)
    heads, kv_heads, head_dim, tokens = 4, 2, 16, 9
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    slots = torch.randperm(16)[:tokens]
    frequencies = 1e-4 ** torch.linspace(0, 1, head_dim // 2)
    angles = rotary_angles_ref(torch.arange(tokens) * 7, frequencies, 1.0, torch.float32)
    weight = torch.rand(heads + kv_heads, head_dim)
    found = []
    for place in (qk_rope_store_ref, eager_qk_rope_store):
        k, v = torch.zeros(2, 4, 4, kv_heads, head_dim)
        q = place(
            qkv, *angles, norm_weight=weight, eps=1e-6, k_pages=k, v_pages=v, slots=slots,
            num_heads=heads,
        )  # fmt: skip
        found.append((q, k, v))
    torch.testing.assert_close(found[0], found[1])
    assert found[0][1].abs().sum() > 0


@pytest.mark.parametrize(("top_k", "top_p"), [(20, 0.9), (0, 0.8), (3, 1.0)])
def test_eager_draws_come_from_what_is_kept(top_k: int, top_p: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(1, 60) / 2
    row = Row(temperature=0.6, top_k=top_k, top_p=top_p)
    values, ids = keep_likely(logits / row.temperature, make_choices(logits, [row]))
    kept = set(ids[values > float("-inf")].tolist())
    drawn = eager_draw_filtered(logits.expand(2000, -1), top_k, top_p).flatten().tolist()
    assert set(drawn) <= kept
    assert int(logits.argmax()) in drawn
    assert len(set(drawn)) > 1


def test_eager_experts_are_the_kernels(seed: int) -> None:
    torch.manual_seed(seed)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(9)])
    given = {
        "experts_TA": chosen, "shares_TA": torch.rand(9, 2),
        "gate_up_XWE": torch.randn(6, 10, 8), "down_XEI": torch.randn(6, 8, 5),
    }  # fmt: skip
    x, residual = torch.randn(9, 8), torch.randn(9, 8)
    want = mix_experts_ref(residual.clone(), x, **given)
    torch.testing.assert_close(eager_mix_experts(residual, x, **given), want)
    other = eager_mix_experts(residual, x, **given | {"experts_TA": chosen.flip(1)})
    assert not torch.allclose(other, want), "the control"


@pytest.mark.parametrize("rule", [GroupRule(2, 2, 1, True, 1.0), SoftmaxRule(2, False)])
def test_both_sides_of_a_mixture_case_compute_the_same(
    rule: GroupRule | SoftmaxRule, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """On the same inputs; but for eager, which only sorts rows."""
    monkeypatch.setattr(mixture_cases, "MIXTURES", (Mixture("small", 8, 16, 4, rule),))
    names = []
    for case in mixture_cases.cases(torch.float32, CPU):
        names.append(case.name)
        if case.size.endswith((" 32 tokens", " 64 rows")):
            results = []
            for make in (case.ours, case.eager):
                assert make is not None
                torch.manual_seed(seed)
                results.append(make()())
            if case.name != "group_rows":
                torch.testing.assert_close(results[0], results[1])
    assert set(names) == {"router", "choose_experts", "group_rows", "mix_experts"}


def test_rates_are_shares_of_the_ceilings() -> None:
    ceilings = Ceilings(bytes_per_s=4e12, flop_per_s=800e12, source="test")
    found = rates(10.0, 70.0, moved=20_000_000, flop=4_000_000_000, ceilings=ceilings)
    assert found == {
        "us": 10.0,
        "eager_us": 70.0,
        "speedup": 7.0,
        "gb_per_s": 2000.0,
        "copy_share": 0.5,
        "tflop_per_s": 400.0,
        "matrix_share": 0.5,
    }
    silent = rates(10.0, None, moved=0, flop=0, ceilings=ceilings)
    assert {name for name, value in silent.items() if value is not None} == {"us"}
