"""The two training losses; both average over rows, and within a row over the tokens to be learnt.

Averaging by row keeps a four-token sum as important as a line of prose, as LLaDA's fine-tuning loss
does (Nie et al. 2025, arXiv 2502.09992, section 2.3).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.demo_models.corpus import BLOCK_SIZE, LEARN_AR, LEARN_BLOCK, WINDOW
from benchmarks.demo_models.model import DemoLM, block_bias
from benchmarks.demo_models.vocabulary import MASK

NUM_VIEWS = 3
"""Noisy copies of a window: one all masked, and two that mask complementary halves."""


class Batch(NamedTuple):
    """`token_ids` and `learn` are [rows, length]; `window` [rows], where the noise starts."""

    token_ids: Tensor
    learn: Tensor
    window: Tensor


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Loss of every token, in float32; shaped as `target`."""
    flat = F.cross_entropy(logits.flatten(0, -2).float(), target.flatten(), reduction="none")
    return flat.view(target.shape)


def autoregressive_loss(model: DemoLM, batch: Batch) -> Tensor:
    """Next-token loss on the replies and on prose."""
    ids = batch.token_ids
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
    hidden = model.hidden_states(ids[:, :-1], positions, None)
    weight = ((batch.learn[:, 1:] & LEARN_AR) != 0).float()
    weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
    return (cross_entropy(model.logits(hidden), ids[:, 1:]) * weight).sum() / ids.shape[0]


def noise(learnt: Tensor) -> Tensor:
    """Which tokens each view masks, [rows, views, window].

    The all-masked view is where decoding of every block begins. The other two are complementary:
    whatever one reveals the other asks for, so that each token is learnt once in them (SDAR, arXiv
    2510.06303). The share of masked tokens is uniform and drawn for every block (BD3-LM, arXiv
    2503.09573).
    """
    rows, window = learnt.shape
    share = torch.rand(rows, window // BLOCK_SIZE, device=learnt.device)
    half = torch.rand(rows, window, device=learnt.device) < share.repeat_interleave(BLOCK_SIZE, 1)
    return torch.stack((learnt, learnt & half, learnt & ~half), dim=1)


def block_diffusion_loss(model: DemoLM, batch: Batch) -> Tensor:
    """Loss of the masked tokens in one forward over [clean row, noisy windows].

    Only a window around the last reply gets noisy copies, not the whole row as in BD3-LM: nothing
    else is learnt there, and a long row would cost three times as much.
    """
    rows, length = batch.token_ids.shape
    device = batch.token_ids.device
    inside = batch.window[:, None] + torch.arange(WINDOW, device=device)
    clean = batch.token_ids.gather(1, inside)
    learnt = (batch.learn.gather(1, inside) & LEARN_BLOCK) != 0
    masked = noise(learnt)
    noisy = torch.where(masked, MASK, clean[:, None])
    token_ids = torch.cat((batch.token_ids, noisy.flatten(1)), dim=1)
    everywhere = torch.arange(length, device=device).expand(rows, length)
    positions = torch.cat((everywhere, inside.repeat(1, NUM_VIEWS)), dim=1)
    view = torch.arange(1, NUM_VIEWS + 1, device=device).repeat_interleave(WINDOW)
    view = torch.cat((torch.zeros(length, dtype=view.dtype, device=device), view))
    bias = block_bias(positions // BLOCK_SIZE, view)
    hidden = model.hidden_states(token_ids, positions, bias)[:, length:]
    target = clean.repeat(1, NUM_VIEWS)
    weight = masked.flatten(1).float()
    weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
    return (cross_entropy(model.logits(hidden), target) * weight).sum() / rows
