"""Which ids a row may choose, applied to its logits. It does not know who says so."""

from __future__ import annotations

from engine_service.kernels.bitmask import apply_bitmask
from engine_service.sampling.batch import DecideBatch
from engine_service.sampling.head import KnownLogits, Logits


def masked_logits(batch: DecideBatch) -> Logits:
    """The batch's logits, at -inf where a row's mask has no bit; its own where no row has a mask.

    All that is decided, penalised or scored afterwards is of the ids that are left. The logits are
    overwritten; rows without a mask have all bits.
    """
    masks = batch.tables.masks
    if not batch.wants.mask or masks is None:
        return batch.logits
    logits_NV = batch.logits.whole()
    apply_bitmask(logits_NV, masks.index_select(0, batch.rows))
    return KnownLogits(logits_NV)
