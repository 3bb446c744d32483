"""Embedding rows of the tokens that stand in the device's token table. It knows no modules."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl, triton

Own = tuple[int, int]
"""(first id, how many) that the rows of a matrix are of."""


def gather_embeddings_ref(
    tokens: torch.Tensor, places_T: torch.Tensor, weight_VE: torch.Tensor, own: Own | None = None
) -> torch.Tensor:
    """[T, E]: weight[tokens[places]]; `tokens` is flat, int64. Ids that are not `own` are zero."""
    ids = tokens.index_select(0, places_T)
    if own is None:
        return functional.embedding(ids, weight_VE)
    ids = ids - own[0]
    is_own = (ids >= 0) & (ids < own[1])
    return functional.embedding(ids.where(is_own, 0), weight_VE) * is_own[:, None]


def gather_embeddings(
    tokens: torch.Tensor, places_T: torch.Tensor, weight_VE: torch.Tensor, own: Own | None = None
) -> torch.Tensor:
    """`gather_embeddings_ref`; one launch on CUDA, where places and ids are not checked."""
    gather = gather_embeddings_triton if runs_triton(weight_VE) else gather_embeddings_ref
    return gather(tokens, places_T, weight_VE, own)


@jit
def _gather_embeddings_kernel(
    token_ptr: tl.tensor,
    place_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    weight_stride: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    token = tl.load(token_ptr + tl.load(place_ptr + row))
    if SHARED:
        token -= first
        own = inside & (token >= 0) & (token < count)
        x = tl.load(weight_ptr + token * weight_stride + column, mask=own, other=0.0)
    else:
        x = tl.load(weight_ptr + token * weight_stride + column, mask=inside)
    tl.store(out_ptr + row * WIDTH + column, x, mask=inside)


def gather_embeddings_triton(
    tokens: torch.Tensor, places_T: torch.Tensor, weight_VE: torch.Tensor, own: Own | None = None
) -> torch.Tensor:
    """`gather_embeddings_ref` in one launch, any number format; rows of the weight may lie apart.

    A place or an id that does not exist reads whatever lies there.
    """
    num_tokens, width = len(places_T), weight_VE.shape[1]
    out = weight_VE.new_empty(num_tokens, width)
    block = min(triton.next_power_of_2(width), 2048)
    overlap = overlaps_launches(weight_VE.device)
    _gather_embeddings_kernel[(num_tokens, triton.cdiv(width, block))](
        tokens,
        places_T.contiguous(),
        weight_VE,
        out,
        weight_VE.stride(0),
        *(own or (0, 0)),
        WIDTH=width,
        SHARED=own is not None,
        BLOCK=block,
        PDL=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out
