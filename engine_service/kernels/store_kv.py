"""Writes keys and values of new tokens into their pages. It does not know who owns a page."""

from __future__ import annotations

import torch


def store_kv_ref(pages_NGKD: torch.Tensor, x_TKD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Token t goes to page slots[t] // G, offset slots[t] % G."""
    page_size = pages_NGKD.shape[1]
    for token, slot in enumerate(slots_T.tolist()):
        pages_NGKD[slot // page_size, slot % page_size] = x_TKD[token]


def store_kv(
    pages_NGKD: torch.Tensor, x_TKD: torch.Tensor, page_T: torch.Tensor, offset_T: torch.Tensor
) -> None:
    """`store_kv_ref` for pages of any memory order; page and offset are computed once a step."""
    pages_NGKD.index_put_((page_T, offset_T), x_TKD)
