"""The models that come with the package load, and compute what transformers computes with them."""

import pytest
import torch
import transformers

from engine_service.worker.checkpoint import builtin_models
from tests.models.checkpoints import load
from tests.models.paged import PagedRunner, PageTable, causal


@pytest.mark.parametrize("name", ["demo", "demo-block"])
def test_logits_equal_transformers(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    folder = builtin_models()[name]
    ours = load(folder)
    block = ours.traits.mask_block
    config = transformers.AutoConfig.for_model("qwen3")
    config.update(transformers.PretrainedConfig.get_config_dict(folder)[0] | {"dtype": "float32"})
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(folder, config=config).eval()
    ids = torch.randint(0, ours.traits.vocab_size, (64,))
    of_block = torch.arange(64) // block
    hidden = of_block[:, None] < of_block[None, :]
    mask = torch.zeros(64, 64).masked_fill(hidden, float("-inf"))[None, None]
    with torch.inference_mode():
        want = theirs(ids[None], attention_mask=mask).logits[0]
    runner = PagedRunner(ours, "sdpa", PageTable(1, 64, 16, seed))
    (got,) = runner.logits([ids], [causal(0, 0, 64, block)])
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
