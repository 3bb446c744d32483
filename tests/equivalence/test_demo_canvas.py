"""What trains and measures the packaged full-canvas model means what the engine does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks.demo_models import corpus, evaluate, export
from benchmarks.demo_models.model import DemoLM, Shape
from benchmarks.demo_models.objectives import canvas_loss
from benchmarks.demo_models.trainer import draw, on_device
from benchmarks.demo_models.vocabulary import EOS
from tidemill.bench import tasks
from tidemill.llm import LLM
from tidemill.sampling_params import SamplingParams

SHAPE = Shape(
    num_heads=2,
    num_kv_heads=2,
    qk_norm=False,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
)


def trained(steps: int) -> tuple[DemoLM, list[float]]:
    """A model after a few steps on a few rows, and its losses."""
    torch.manual_seed(0)
    rng = random.Random(0)
    rows = []
    while len(rows) < 32:
        row = corpus.draw_row(rng, rng.choice(["add", "sort", "json", "prose"]), corpus.SHORT_LEN)
        rows += [] if row is None else [row]
    pool = on_device(corpus.packed(rows, corpus.SHORT_LEN), torch.device("cpu"))
    model, losses = DemoLM(SHAPE), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = canvas_loss(model, draw(pool, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_the_packaged_model_knows_its_tasks(cache: str) -> None:
    """In a few steps; one item in a thousand is wrong (benchmarks/demo_models)."""
    items = tasks.held_out(14)
    chats = [[{"role": "user", "content": item.prompt}] for item in items]
    params = SamplingParams(temperature=0, max_tokens=64, method_params={"cache": cache})
    outputs = LLM("demo-canvas", device="cpu").chat(chats, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert sum(map(tasks.is_correct, items, texts)) >= 13
    assert not any(map(tasks.is_correct, items[1:], texts)), "the control: another's answer"
    total = sum(output.usage.output_tokens for output in outputs)
    assert total > 3 * sum(output.usage.forward_passes for output in outputs)


def test_the_engine_decodes_as_the_slow_evaluation_does(tmp_path: Path) -> None:
    model, losses = trained(12)
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), losses
    # As it is exported: rounded. The weight of the end token is dropped, so that answers are long.
    model.load_state_dict(export.rounded_weights(model))
    with torch.no_grad():
        model.model.embed_tokens.weight[EOS] = 0
    config = export.canvas_config(SHAPE)
    export.write_folder(tmp_path / "canvas", model, config, rename=export.llada_name)
    prompts = [evaluate.chat_prompt(item) for item in tasks.held_out(4)]
    llm = LLM(str(tmp_path / "canvas"), device="cpu")
    length = evaluate.MAX_NEW_TOKENS
    threshold = parting(model, prompts)
    asked = SamplingParams(temperature=0, max_tokens=length, method_params={"threshold": threshold})
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    replies = evaluate.decode_canvas(model, prompts, threshold)
    for reply, output in zip(replies, outputs, strict=True):
        assert reply.token_ids == list(output.outputs[0].token_ids)
        assert reply.forwards == output.usage.forward_passes
    assert any(len(reply.token_ids) > 32 for reply in replies), "no answer has a second block"


def parting(model: DemoLM, prompts: list[list[int]]) -> float:
    """The highest threshold that some positions reach and others do not. Processors train in
    bfloat16 each in its own way, so how sure the model is differs between them."""
    alone = sum(reply.forwards for reply in evaluate.decode_canvas(model, prompts, 2.0))
    at_once = sum(reply.forwards for reply in evaluate.decode_canvas(model, prompts, 0.0))
    for hundredths in range(40, 0, -1):
        replies = evaluate.decode_canvas(model, prompts, hundredths / 100)
        if at_once < sum(reply.forwards for reply in replies) < alone:
            return hundredths / 100
    raise AssertionError("the control: no threshold makes a difference")
