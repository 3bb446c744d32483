"""The rank process of a group whose rank 0 takes every rank's share of pages for another one's."""

from __future__ import annotations

import sys

from engine_service import rank
from engine_service.ranks import group_pages
from engine_service.worker.page_shares import PageShare, shares_of


def swapped(*sizes: int) -> list[PageShare]:
    return shares_of(*sizes)[::-1]


if __name__ == "__main__":
    group_pages.shares_of = swapped
    sys.exit(rank.main(sys.argv[1:]))
