"""Chooses the keys that a sparse cache keeps, and moves them into the row's pages.

Those outside of a block that its queries attend to most, for every key-value head by itself or for
all of them together (Sparse-dLLM, Song et al. 2025, arXiv 2508.02558; dLLM-Serve ranks by head).
It runs once a refresh, in plain torch: what it writes is read in place by every step that follows.

Shape legend: A tokens aside, S spans that keep keys, Q longest block, C most candidates, M most
slots of a row's pages, H query heads, K key-value heads, D head size, G page size.
"""

from __future__ import annotations

import torch

from engine_service.attention.base import KeptKeys, LayerCache


def keep_keys(q_AHD: torch.Tensor, own: LayerCache, layer: int, kept: KeptKeys) -> None:
    """Copies the keys and values that `kept` asks for out of `own`, where the tokens aside lie.

    A head's keys stay in order of position; slots behind the last one are cleared, because whoever
    gathers a page reads them.
    """
    page_size, num_heads = own.k.shape[1], own.k.shape[2]
    page, offset = kept.candidates // page_size, kept.candidates % page_size
    scores = _scores(q_AHD, own.k[page, offset], kept)
    chosen_SKM, is_kept_SM = _choose(_pool(scores, kept), kept)
    slots = kept.candidates[:, None].expand(-1, num_heads, -1).gather(2, chosen_SKM)
    heads = torch.arange(num_heads, device=slots.device)[:, None]
    source = (slots // page_size, slots % page_size, heads)
    targets = kept.targets[:, None].expand_as(slots)
    place = (targets // page_size, targets % page_size, heads.expand_as(slots))
    cache = kept.caches[layer]
    for pages, chosen in ((cache.k, own.k), (cache.v, own.v)):
        pages.index_put_(place, chosen[source].where(is_kept_SM[:, None, :, None], 0))


def _scores(q_AHD: torch.Tensor, k_SCKD: torch.Tensor, kept: KeptKeys) -> torch.Tensor:
    """[S, K, C] float32: how much the blocks' mean queries attend to every candidate, unscaled."""
    mean_SHD = (q_AHD[kept.queries].float() * kept.shares[:, :, None, None]).sum(1)
    grouped = mean_SHD.unflatten(1, (k_SCKD.shape[2], -1))
    scores = torch.einsum("skgd,sckd->skgc", grouped, k_SCKD.float())
    own, common = scores.amax(2), scores.sum((1, 2))[:, None]
    return own.where(kept.by_head[:, None, None], common)


def _pool(scores_SKC: torch.Tensor, kept: KeptKeys) -> torch.Tensor:
    """The largest score within `reach` candidates; -inf behind the last candidate."""
    place = torch.arange(scores_SKC.shape[2], device=scores_SKC.device)
    is_candidate = place < kept.num_candidates[:, None]
    scores = scores_SKC.where(is_candidate[:, None], -torch.inf)
    pooled = scores
    for distance in range(1, min(kept.max_reach + 1, len(place))):
        is_near = (kept.reach >= distance)[:, None, None]
        for ahead in (distance, -distance):
            near = scores.roll(ahead, dims=2)
            wraps = (place < ahead) if ahead > 0 else (place >= len(place) + ahead)
            pooled = torch.maximum(pooled, near.where(is_near & ~wraps, -torch.inf))
    return pooled.where(is_candidate[:, None], -torch.inf)


def _choose(scores_SKC: torch.Tensor, kept: KeptKeys) -> tuple[torch.Tensor, torch.Tensor]:
    """([S, K, M] chosen candidates in order, anything behind the last; [S, M] which are chosen).

    Of equal scores the first candidate wins.
    """
    num_candidates, num_slots = scores_SKC.shape[2], kept.targets.shape[1]
    ranked = scores_SKC.sort(dim=2, descending=True, stable=True).indices
    missing = num_slots - num_candidates
    if missing > 0:
        ranked = torch.nn.functional.pad(ranked, (0, missing))
    is_kept = torch.arange(num_slots, device=ranked.device) < kept.num_kept[:, None]
    chosen = ranked[:, :, :num_slots].where(is_kept[:, None], num_candidates)
    return chosen.sort(dim=2).values.clamp(max=num_candidates - 1), is_kept
