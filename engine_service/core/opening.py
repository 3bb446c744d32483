"""An admitted sequence as a request that can be queued. It does not know the queue."""

from __future__ import annotations

from typing import Any

from engine_service.core.admission import Admitted
from engine_service.core.blocks import Blocks
from engine_service.core.messages import Submit
from engine_service.core.pages import PageManager
from engine_service.core.params import ResolvedSampling
from engine_service.core.pinning import pin
from engine_service.core.request import Request
from engine_service.core.step import FULL
from engine_service.core.strategy import DecodeStrategy


def open_request(submit: Submit, admitted: Admitted, pages: PageManager, now_ns: int) -> Request:
    """`now_ns` is the arrival of sequences that bring none."""
    token_ids, strategy, params, sampling, pinned, found = admitted
    prompt_len = len(token_ids)
    max_len = prompt_len + sampling.max_tokens
    canvas = pin(strategy.begin(prompt_len, params, max_len), prompt_len, pinned)
    return Request(
        key=submit.key,
        request_id=submit.request_id,
        committed=token_ids,
        prompt_len=prompt_len,
        canvas=canvas.watched() if submit.emit_canvas else canvas,
        strategy=strategy,
        params=params,
        sampling=sampling,
        table=pages.open(strategy.mask_block, submit.cache_salt),
        priority=submit.priority,
        fairness_key=submit.fairness_key,
        arrival_ns=submit.arrival_ns or now_ns,
        emit_canvas=submit.emit_canvas,
        score_from=prompt_len if sampling.prompt_logprobs is None else 1,
        max_len=max_len,
        blocks=_blocks_of(strategy, prompt_len, max_len, params),
        stop_ids=sampling.stop_token_ids,
        pinned=pinned,
        is_plain=_is_plain(submit, strategy, sampling) and found.constraint is None,
        mask=found.mask,
        constraint=found.constraint,
        only_prefills=submit.only_prefills,
        marks=[] if submit.traced else None,
    )


def _blocks_of(strategy: DecodeStrategy, prompt_len: int, max_len: int, params: Any) -> Blocks:
    """What one span decides on is a block, in models that have none of their own."""
    if strategy.mask_block < FULL:
        return Blocks(0, strategy.mask_block)
    return Blocks(prompt_len, max(1, strategy.needs(prompt_len, max_len, params).logits))


def _is_plain(submit: Submit, strategy: DecodeStrategy, sampling: ResolvedSampling) -> bool:
    """Whether most tokens of a sequence need nothing but to be appended and reported."""
    watched = (sampling.logprobs, sampling.prompt_logprobs)
    is_watched = submit.emit_canvas or sampling.stop_token_sequences or watched != (None, None)
    return strategy.append_only and not is_watched
