"""Writes decided tokens and their final bits into the device's token tables.

It does not know how a token was decided.
"""

from __future__ import annotations

import torch

from engine_service.kernels.jit import jit, overlaps_launches, runs_triton, tl


def store_tokens_ref(
    tokens_RL: torch.Tensor,
    fixed_RL: torch.Tensor,
    rows_N: torch.Tensor,
    positions_N: torch.Tensor,
    token_ids_N: torch.Tensor,
    final_N: torch.Tensor | None = None,
) -> None:
    """tokens[rows, positions] = token_ids and fixed[rows, positions] = final (None: all True).

    Ids, rows and positions are int64, the bits bool. Places are distinct or hold equal values.
    """
    final = torch.ones_like(token_ids_N, dtype=torch.bool) if final_N is None else final_N
    tokens_RL[rows_N, positions_N] = token_ids_N
    fixed_RL[rows_N, positions_N] = final


def store_tokens(
    tokens_RL: torch.Tensor,
    fixed_RL: torch.Tensor,
    rows_N: torch.Tensor,
    positions_N: torch.Tensor,
    token_ids_N: torch.Tensor,
    final_N: torch.Tensor | None = None,
) -> None:
    """`store_tokens_ref`; one launch on CUDA, where rows and positions are not checked."""
    store = store_tokens_triton if runs_triton(tokens_RL) else store_tokens_ref
    store(tokens_RL, fixed_RL, rows_N, positions_N, token_ids_N, final_N)


@jit
def _store_tokens_kernel(
    token_ptr: tl.tensor,
    fixed_ptr: tl.tensor,
    row_ptr: tl.tensor,
    position_ptr: tl.tensor,
    id_ptr: tl.tensor,
    final_ptr: tl.tensor,
    token_stride: tl.tensor,
    fixed_stride: tl.tensor,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0)
    row = tl.load(row_ptr + index)
    position = tl.load(position_ptr + index)
    token_id = tl.load(id_ptr + index)
    final = True if final_ptr is None else tl.load(final_ptr + index)
    tl.store(token_ptr + row * token_stride + position, token_id)
    tl.store(fixed_ptr + row * fixed_stride + position, final)


def store_tokens_triton(
    tokens_RL: torch.Tensor,
    fixed_RL: torch.Tensor,
    rows_N: torch.Tensor,
    positions_N: torch.Tensor,
    token_ids_N: torch.Tensor,
    final_N: torch.Tensor | None = None,
) -> None:
    """`store_tokens_ref` in one launch; rows of the tables may lie apart."""
    overlap = overlaps_launches(tokens_RL.device)
    _store_tokens_kernel[(len(rows_N),)](
        tokens_RL,
        fixed_RL,
        rows_N.contiguous(),
        positions_N.contiguous(),
        token_ids_N.contiguous(),
        None if final_N is None else final_N.contiguous(),
        tokens_RL.stride(0),
        fixed_RL.stride(0),
        PDL=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
