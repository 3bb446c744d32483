"""One table of masks: a row has what it was given last, and nothing of who was there before."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine_service.core.step import RowMask
from engine_service.sampling.masks import masked_logits
from engine_service.worker.masks import MaskTable
from tests.row_builders import make_row
from tests.sampling_batches import Row, make_batch

ROWS, VOCAB = 6, 77
DEVICE = torch.device("cpu")


def random_mask(rng: random.Random) -> bytes:
    return rng.getrandbits(96).to_bytes(12, "little")


def test_rows_and_masks_against_a_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    table, owned = MaskTable(ROWS + 1, DEVICE), dict[int, bytes | None]()
    assert table.words is None
    for _ in range(60):
        taken = rng.sample(range(ROWS), rng.randint(0, 3))
        new = [make_row(row, [1])._replace(mask=None) for row in taken]
        new = [one._replace(mask=random_mask(rng)) if rng.random() < 0.3 else one for one in new]
        owned |= {one.row: one.mask for one in new}
        masks = [RowMask(row, random_mask(rng)) for row in rng.sample(range(ROWS), 2)]
        masks = masks if rng.random() < 0.5 else []
        owned |= dict(masks)
        table.apply(new, masks)
        for row in range(ROWS + 1):
            mask = owned.get(row)
            assert table.has_mask[row] == (mask is not None)
            if table.words is not None:
                words = [-1] * 3 if mask is None else np.frombuffer(mask, np.int32).tolist()
                assert table.words[row].tolist() == words


def test_who_never_has_a_mask_pays_nothing() -> None:
    table = MaskTable(ROWS + 1, DEVICE)
    table.apply([make_row(0, [1])], [])
    assert table.words is None
    assert not table.has_mask.any()


@pytest.mark.parametrize("wants", [False, True])
def test_masks_act_on_their_rows_alone(wants: bool) -> None:
    logits = torch.randn(3, VOCAB)
    before, rows = logits.clone(), [Row() for _ in range(3)]
    masks = torch.randint(-(2**31), 2**31, (3, 3)).to(torch.int32)
    masks[1] = -1
    batch = make_batch(logits, rows)
    tables = replace(batch.tables, masks=masks)
    batch = replace(batch, tables=tables, wants=replace(batch.wants, mask=wants))
    got = masked_logits(batch).whole()
    assert torch.equal(got[1], before[1])
    for n, row in enumerate(batch.rows.tolist()):
        for token in range(before.shape[1]):
            allowed = bool(int(masks[row, token // 32]) >> token % 32 & 1)
            kept = allowed or not wants
            assert got[n, token] == (before[n, token] if kept else -torch.inf)
    assert (got == -torch.inf).any() == wants
