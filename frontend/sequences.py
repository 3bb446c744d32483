"""A choice as the engine is asked for it. It does not know the wire."""

from __future__ import annotations

from dataclasses import replace

from frontend.choice import Choice
from frontend.engine_convert import pack_ids
from frontend.messages import Sequence
from frontend.request import Options


def sequence_of(choice: Choice, options: Options) -> Sequence:
    """What the engine has to generate for `choice`."""
    prompt = choice.prompt
    # Scoring only: the engine generates at least one token, which nobody sees.
    max_tokens = 1 if prompt.max_tokens == 0 else prompt.max_tokens
    scores = options.prompt_logprobs
    if options.echo and options.logprobs is not None:
        scores = max(options.logprobs, scores or 0)
    return Sequence(
        index=choice.index,
        choice=choice.index % options.width,
        prompt=pack_ids(prompt.token_ids),
        sampling=replace(options.sampling, max_tokens=max_tokens),
        decoding=options.decoding,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        logprobs=0 if options.ranks and options.logprobs is None else options.logprobs,
        prompt_logprobs=scores,
        cache_salt=options.cache_salt,
        priority=options.priority,
        fairness_key=options.fairness_key,
        emit_canvas=options.emit_canvas,
        pinned=prompt.gap.pinned(len(prompt.token_ids)) if prompt.gap else (),
        constraint=prompt.constraint,
    )
