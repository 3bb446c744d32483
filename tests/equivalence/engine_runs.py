"""Prompts through an engine step by step. Ranks import it too: neither pytest nor transformers."""

from __future__ import annotations

import struct
from array import array

from engine_service.composition import Engine
from engine_service.core.messages import Submit
from engine_service.core.params import DecodingChoice, SamplingParams


def run(
    engine: Engine, prompts: list[list[int]], count: int, knobs=None, each=None, **sampling
) -> tuple[list[list[int]], int]:
    """Tokens of every prompt, and how often somebody was preempted. `sampling` is that of all, and
    what `each` one has beside it."""
    outputs: list[list[int]] = [[] for _ in prompts]
    preemptions = finished = 0
    for key, prompt in enumerate(prompts):
        wishes = {"temperature": 0.0, "ignore_eos": True, "max_tokens": count} | sampling
        wishes |= each[key] if each else {}
        engine.scheduler.submit(
            Submit(
                key=key,
                request_id=str(key),
                prompt=struct.pack(f"<{len(prompt)}I", *prompt),
                sampling=SamplingParams(**wishes),
                decoding=DecodingChoice(params=knobs[key] if knobs else {}),
            )
        )
    while finished < len(prompts):
        plan = engine.scheduler.schedule()
        engine.scheduler.apply(plan, engine.executor.collect(engine.executor.launch(plan)))
        engine.scheduler.check_integrity()
        output = engine.scheduler.emit()
        if output is None:
            continue
        tokens = iter(array("I", output.token_ids))
        for key, size in zip(output.keys, output.counts, strict=True):
            outputs[key] += [next(tokens) for _ in range(size)]
        for _, finish in output.finished:
            finished += 1
            preemptions += finish.usage.preemptions
    return outputs, preemptions
