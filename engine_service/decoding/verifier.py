"""Adaptive parallel decoding as published: a small causal model says how much of a draft is kept
(APD; Israel, Van den Broeck and Grover 2025, arXiv 2506.00413).

A step of a diffusion model drafts every open position from its own marginal. A second model of the
same vocabulary reads the drafted tokens in one causal pass. The target of a position is the product
of both, marginal^R * causal^(1 - R); it is sampled with the random numbers that the draft was
sampled with, and from the left everything is kept up to the first position where the two differ.

The device half of a diffusion method is to call it between the draft and the reveal, once an engine
loads a second model, as speculative decoding will. No engine does yet: no unmask rule names this
one, and no request can ask for it. How much is drafted and how old the diffusion model's keys may
be (the paper's M and W) are the method's spans and caches, not the verifier's.

It follows the paper where the authors' code differs: temperature is applied once, to the draft as
to the target; their code divides the draft by it twice, and their target is a plain argmax. It does
not know rules, blocks or where a second model comes from.
Shape legend: N decided positions, V vocabulary, R spans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.head import KnownLogits
from engine_service.sampling.sampler import choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One token for every decided position of a batch, span after span, from left to right."""

    token_ids: torch.Tensor
    """[N] int64: `choose`'s at open positions, the token that stands there at all others."""
    is_open: torch.Tensor
    """[N] bool: not decided before; pinned tokens may stand between open positions."""
    draws: torch.Tensor
    """[N] int64: the `draws` that the open positions were chosen with."""


class Verifier(Protocol):
    """A causal model that reads drafts. It keeps whatever it caches of a row by itself."""

    def logits(self, batch: DecideBatch, token_ids: torch.Tensor) -> torch.Tensor:
        """[N, V] raw logits of every decided position, given all that stands to its left.

        That is the row's tokens in `batch.tables` ahead of its span, then those of `token_ids` [N]
        (a draft's) within it. V is the batch's: ids that the model lacks are at -inf. Nothing waits
        for the device, and nothing of the batch is written to.
        """


def accepted(
    batch: DecideBatch, draft: Draft, causal_NV: torch.Tensor, weight_R: torch.Tensor
) -> torch.Tensor:
    """[N] bool: the open positions whose drafted tokens are kept, a prefix of those of each span.

    `batch.logits_NV` are the marginals that the draft was chosen from, `causal_NV` the verifier's
    logits, `weight_R` [R] the share R of the marginals, in [0, 1]: with 1 everything is kept, with
    0 what the verifier would have said itself. A span's first open position is kept in any case: a
    marginal of one token is no approximation, and every step gets on. What changes scores (bans,
    bias, minimum length, temperature, filters) does so in the target as in the draft, once; at
    temperature 0 both are the argmax. Nothing here waits for the device: a CUDA graph can hold it.
    """
    count = torch.arange(len(batch.positions), device=batch.positions.device)
    span_of = torch.searchsorted(batch.cu_decide[1:].contiguous(), count, right=True)
    before = batch.cu_decide[span_of]
    mixed = _mix(batch.logits_NV, causal_NV, weight_R[span_of])
    # The noise is a function of seed, position and draw: the same call draws the same again.
    target = choose(replace(batch, logits=KnownLogits(mixed)), draft.draws)
    is_first = draft.is_open & (_count_through(draft.is_open, before) == 1)
    differs = draft.is_open & ~is_first & (target != draft.token_ids)
    return draft.is_open & (_count_through(differs, before) == 0)


def _mix(
    marginal_NV: torch.Tensor, causal_NV: torch.Tensor, weight_N: torch.Tensor
) -> torch.Tensor:
    """[N, V] weight * marginal + (1 - weight) * causal, in at least float32.

    These are the logits of the product: what normalises either softmax is the same for a whole row.
    An id that one model rules out (-inf) is ruled out, unless that model's weight is 0.
    """
    dtype = torch.promote_types(marginal_NV.dtype, torch.float32)
    weight = weight_N.to(dtype)[:, None]
    mixed = (marginal_NV * weight).masked_fill_(weight == 0, 0.0)
    rest = 1 - weight
    return mixed.add_((causal_NV * rest).masked_fill_(rest == 0, 0.0))


def _count_through(flags: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """[N] how many flags are set from the start of the position's span, at index `before`, through
    the position itself."""
    through = torch.nn.functional.pad(flags.cumsum(dim=0), (1, 0))
    return through[1:] - through[before]
