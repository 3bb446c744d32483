"""What ranks that have loaded are compared by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_service.ranks.group import _compare
from engine_service.ranks.messages import Loaded
from tidemill.runtime.errors import FailedPrecondition


def follower(**sizes: object) -> SimpleNamespace:
    return SimpleNamespace(name="rank 1 on b", loaded=Loaded(sizes))


def test_ranks_that_loaded_something_else_are_told_what_and_what_to_do() -> None:
    own = {"num_pages": 8, "weight_version": "x"}
    _compare([follower(**own)], own)  # type: ignore[list-item]
    with pytest.raises(FailedPrecondition, match=r"num_pages 7, rank 0 8: .* and versions$"):
        _compare([follower(**own | {"num_pages": 7})], own)  # type: ignore[list-item]
    with pytest.raises(FailedPrecondition, match="weight_version 'y', rank 0 'x'"):
        _compare([follower(**own | {"weight_version": "y"})], own)  # type: ignore[list-item]
