"""The training losses; all average over rows, and within a row over the tokens to be learnt.

Averaging by row keeps a four-token sum as important as a line of prose, as LLaDA's fine-tuning loss
does (Nie et al. 2025, arXiv 2502.09992, section 2.3).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.demo_models.corpus import BLOCK_SIZE, LEARN_AR, LEARN_BLOCK, WINDOW
from benchmarks.demo_models.model import DemoLM, bias_of, block_bias
from benchmarks.demo_models.vocabulary import EOS, MASK

NUM_VIEWS = 3
"""Noisy copies of a window: one all masked, and two that mask complementary halves."""


TAIL_WEIGHT = 2.0
"""What all end tokens behind a canvas's first one count together, in tokens: a short answer on a
long canvas would else be learnt last."""

ALL_MASKED, BLOCKWISE = 0.15, 0.4
"""Shares of the rows that show the canvas as decoding starts, and as decoding block by block does;
in the others any tokens are masked (LLaDA)."""


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


def canvas_noise(canvas: Tensor, start: Tensor) -> Tensor:
    """Which positions of its canvas a row masks, [rows, length]: all of them; those of a block by
    chance and everything behind it; or any by chance. A chance is uniform and drawn per row."""
    rows, length = canvas.shape
    places = torch.arange(length, device=canvas.device)
    kind, share, border, width = torch.rand(4, rows, 1, device=canvas.device)
    size = canvas.sum(1, keepdim=True)
    first = start[:, None] + (border * size).long()
    behind = first + 8 + (width * 25).long()
    chance = torch.rand(rows, length, device=canvas.device) < share
    blockwise = (places >= first) & (chance | (places >= behind))
    masked = torch.where(kind < ALL_MASKED + BLOCKWISE, blockwise, chance)
    return canvas & (masked | (kind < ALL_MASKED))


def canvas_loss(model: DemoLM, batch: Batch) -> Tensor:
    """Loss of the masked tokens of a reply and the end tokens behind it, all seeing all (LLaDA, Nie
    et al. 2025, arXiv 2502.09992, section 2.3). The canvas ends anywhere behind the reply, as
    max_tokens may be anything."""
    ids = batch.token_ids
    rows, length = ids.shape
    places = torch.arange(length, device=ids.device)
    learnt = (batch.learn & LEARN_BLOCK) != 0
    start = learnt.byte().argmax(1)
    stop = length - learnt.flip(1).byte().argmax(1)
    has_end = ids.gather(1, stop[:, None] - 1)[:, 0] == EOS
    room = (torch.rand(rows, device=ids.device) * (length - stop + 1)).long()
    end = stop + torch.where(has_end, room, 0)
    canvas = (places >= start[:, None]) & (places < end[:, None])
    clean = torch.where(canvas & (places >= stop[:, None]), EOS, ids)
    tail = canvas & (((clean == EOS) & canvas).cumsum(1) > 1)
    tail_len = tail.sum(1, keepdim=True).clamp(min=1)
    weight = torch.where(tail, (TAIL_WEIGHT / tail_len).clamp(max=1), 1.0)
    masked = canvas_noise(canvas, start)
    shown = torch.where(masked, MASK, clean)
    bias = bias_of((places < end[:, None])[:, None])
    hidden = model.hidden_states(shown, places[None], bias)
    weight = weight * masked
    weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
    return (cross_entropy(model.logits(hidden), clean) * weight).sum() / rows
