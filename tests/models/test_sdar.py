"""SDAR equals Qwen3's weights under a dense block-causal mask, whatever the order of the steps."""

import random
from pathlib import Path

import pytest
import torch
import transformers

from engine_service.core.step import Span
from engine_service.models.base import CausalModel
from tests.models.checkpoints import Case, load, write
from tests.models.paged import PagedRunner, PageTable, causal

MASK = 319
TOLERANCE = 1e-4


def build(folder: Path, block: int, seed: int) -> tuple[transformers.PreTrainedModel, CausalModel]:
    def as_sdar(config: dict[str, object]) -> None:
        config["architectures"] = ["SDARForCausalLM"]
        config["model_type"] = "sdar"
        config["block_size"] = block
        config["mask_token_id"] = MASK

    case = Case(name="sdar", kind="Qwen3", options={"head_dim": 32}, edit=as_sdar)
    return write(case, folder, seed), load(folder)


def dense(theirs: transformers.PreTrainedModel, ids: torch.Tensor, block: int) -> torch.Tensor:
    """[L, V] with every position seeing all blocks before its own and its own."""
    of_block = torch.arange(len(ids)) // block
    seen = of_block[:, None] >= of_block[None, :]
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    with torch.inference_mode():
        return theirs(ids[None], attention_mask=mask[None, None]).logits[0]


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def test_traits(tmp_path: Path, seed: int) -> None:
    traits = build(tmp_path, 8, seed)[1].traits
    assert (traits.mask_block, traits.mask_token_id, traits.logits_shift) == (8, MASK, 0)
    assert traits.default_method == "block_diffusion"
    assert traits.methods == ("block_diffusion",)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(("block", "page_size"), [(4, 4), (4, 16), (16, 4), (8, 8), (4, 1)])
def test_prefill_denoising_and_fused_opening(
    block: int, page_size: int, backend: str, tmp_path: Path, seed: int
) -> None:
    """Chunks of whole blocks, then blocks decided token by token; a finished block's KV is stored
    by the span that opens the next one."""
    theirs, ours = build(tmp_path, block, seed)
    draw = random.Random(seed)
    prompt_len, end = 3 * block + 1, 6 * block
    row = torch.full((end,), MASK)
    row[:prompt_len] = torch.randint(0, MASK, (prompt_len,))
    runner = PagedRunner(ours, backend, PageTable(1, end, page_size, seed))
    cached = 0
    while cached < prompt_len // block * block:
        stop = cached + block * draw.choice([1, 2])
        stop = min(stop, prompt_len // block * block)
        (got,) = runner.logits([row], [causal(0, cached, stop, block)])
        assert worst(got, dense(theirs, row[:stop], block)[cached:]) < TOLERANCE
        cached = stop
    while cached < end - block:
        open_at = cached if MASK in row[cached : cached + block] else cached + block
        span = causal(0, cached, open_at + block, block)
        (got,) = runner.logits([row], [span])
        assert worst(got, dense(theirs, row[: span.stop], block)[cached:]) < TOLERANCE
        cached = open_at
        masked = (row[open_at : open_at + block] == MASK).nonzero()[:, 0].tolist()
        for place in draw.sample(masked, min(len(masked), draw.choice([1, block]))):
            row[open_at + place] = got[open_at - span.start + place, :MASK].argmax()


def test_rows_of_different_granularity_share_a_step(tmp_path: Path, seed: int) -> None:
    theirs, ours = build(tmp_path, 4, seed)
    rows = [torch.randint(0, MASK, (24,)) for _ in range(3)]
    blocks = [1, 4, 1 << 30]
    runner = PagedRunner(ours, "sdpa", PageTable(3, 24, 4, seed))
    spans = [causal(index, 0, 24, block) for index, block in enumerate(blocks)]
    for got, row, block in zip(runner.logits(rows, spans), rows, blocks, strict=True):
        assert worst(got, dense(theirs, row, block)) < TOLERANCE


@pytest.mark.parametrize("wrong", [1, 2, 8])
def test_a_wrong_block_shows(wrong: int, tmp_path: Path, seed: int) -> None:
    """Negative control: another granularity gives other logits."""
    theirs, ours = build(tmp_path, 4, seed)
    row = torch.randint(0, MASK, (16,))
    runner = PagedRunner(ours, "sdpa", PageTable(1, 16, 4, seed))
    (got,) = runner.logits([row], [causal(0, 0, 16, wrong)])
    assert worst(got, dense(theirs, row, 4)) > 5 * TOLERANCE


def test_claiming_an_unfinished_block_final_shows(tmp_path: Path, seed: int) -> None:
    """Negative control: KV stored while masks were still open must not be reused."""
    theirs, ours = build(tmp_path, 4, seed)
    row = torch.randint(0, MASK, (8,))
    masked = row.clone()
    masked[2:4] = MASK
    runner = PagedRunner(ours, "sdpa", PageTable(1, 8, 4, seed))
    runner.logits([masked], [causal(0, 0, 4, 4)])
    (got,) = runner.logits([row], [Span(0, 4, 8, 8, 4, 4, 8)])
    assert worst(got, dense(theirs, row, 4)[4:]) > 5 * TOLERANCE
