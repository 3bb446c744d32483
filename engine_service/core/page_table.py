"""The pages of one sequence, and the chain of digests by which others find them.

It does not know which pages are free or indexed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine_service.core.journal import PagesStored

DIGEST_BYTES = 16
"""128 bits: two prefixes that meet by chance are not expected in the life of any engine."""


NEVER = 1 << 62
"""More tokens than any sequence has."""


class PageTable:
    """The pages of one sequence, in order, and the digests of its token units.

    Only PageManager writes it, but for the digests: `digests[u + 1]` covers units 0..u,
    `digests[0]` is the seed. They survive `release`, so that nothing is hashed twice after a
    preemption.
    """

    __slots__ = (
        "capacity",
        "claim_stop",
        "digests",
        "num_flushed",
        "num_sealed",
        "packed",
        "pages",
        "pages_per_unit",
        "salt",
        "seal_at",
        "unit",
    )

    def __init__(self, seed: bytes, unit: int, pages_per_unit: int, salt: str) -> None:
        self.pages: list[int] = []
        self.salt = salt
        self.capacity = 0
        """Positions that the pages hold."""
        self.digests = [seed]
        self.packed: list[bytes] = []
        """Tokens of the units that have a digest, as they were hashed."""
        self.unit = unit
        self.pages_per_unit = pages_per_unit
        self.num_flushed = 0
        """Times that the index had been flushed when its first pages came: what is computed behind
        them is of no use to those who came since."""
        self.num_sealed = 0
        """Leading units that are in the index or were taken from it."""
        self.seal_at = unit
        """Tokens that the next unit needs; with fewer `seal` has nothing to do."""
        self.claim_stop = 0
        """Units [num_sealed, claim_stop) are claimed where nobody else claimed them."""

    def hash_units(self, token_ids: Sequence[int], start: int, stop: int) -> list[bytes]:
        """Digests of units 0..u for every u in [start, stop). Hashes only what has not been hashed
        before, and packs that at once: a prompt has thousands of units, and a step waits for them.
        """
        digests, hashed = self.digests, len(self.packed)
        if stop > hashed:
            tokens = token_ids[hashed * self.unit : stop * self.unit]
            # Every machine served has the byte order of the contract, as core/checks.py says.
            packed, size = array("I", tokens).tobytes(), 4 * self.unit
            assert not len(packed) % size, f"{len(tokens)} tokens are no units of {self.unit}"
            for at in range(0, len(packed), size):
                self.packed.append(unit := packed[at : at + size])
                digests.append(blake2b(digests[-1] + unit, digest_size=DIGEST_BYTES).digest())
        return digests[start + 1 : stop + 1]

    def stored(self, unit: int) -> PagesStored:
        """What routers are told of a unit; the seed of the digests is no unit."""
        digests = self.digests
        parent = digests[unit] if unit else b""
        return PagesStored((digests[unit + 1],), parent, self.packed[unit], self.unit, self.salt)


def seed_of(mask_block: int, weight_version: str, salt: str) -> bytes:
    """Where digests begin: sequences share pages only under equal mask block, weights and salt."""
    scope = f"{mask_block}\0{weight_version}\0{salt}"
    return blake2b(scope.encode(), digest_size=DIGEST_BYTES).digest()
