"""How long requests stay, of which a newcomer's wait follows, where an engine is paused."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from engine_service.core.control import PauseMode
from engine_service.core.gate import _MOST_KEPT, Gate, _Kept
from engine_service.core.messages import Abort, FinishReason
from tests.unit.test_scheduler import Desk


def mean_stay(mode: PauseMode | None, *, ends_kept: bool) -> float:
    """In nanoseconds, of eight requests of some steps each, while four of which an engine is paused
    for 100 s."""
    desk = Desk(max_rows=4, queue=100, num_pages=500)
    for key in range(1, 9):
        desk.submit(key, 3, 20)
    for _ in range(5):
        desk.step()
    if mode is not None:
        desk.scheduler.pause(mode)
        for _ in range(40):
            desk.step()
        desk.now += 100 * 10**9
        if ends_kept:
            for key in range(1, 5):
                desk.scheduler.abort(Abort(key, FinishReason.STOP_STRING))
        desk.scheduler.resume()
    desk.run()
    wait_s = desk.scheduler.gate._bounds.wait_s(1, 1)
    assert wait_s is not None
    return wait_s * 1e9


@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize("ends_kept", [False, True])
def test_time_in_a_pause_is_no_stay(mode: PauseMode, ends_kept: bool) -> None:
    """A pause of an hour would make an idle engine refuse all but the first in its queue."""
    usual = mean_stay(None, ends_kept=False)
    assert mean_stay(mode, ends_kept=ends_kept) <= usual
    kept = patch.object(Gate, "stand", lambda *_, **__: None)
    with kept:
        blown_up = mean_stay(mode, ends_kept=ends_kept) > 100 * usual
    assert blown_up is (mode is PauseMode.KEEP), "control: only kept rows stand still"


def test_pauses_are_told_apart_by_who_was_there() -> None:
    kept, all_of_them = _Kept(), []
    for number in range(_MOST_KEPT):
        kept.stand(100 * number, still=True)
        kept.stand(100 * number + 1, still=True)  # asked again
        kept.stand(100 * number + 7, still=False)
        kept.stand(100 * number + 50, still=False)  # none to end
        all_of_them.append(kept.since(100 * number + 50, 100 * number + 60))
        assert kept.since(100 * number - 50, 100 * number + 60) == 7
    assert not any(all_of_them)
    assert kept.since(0, 10**6) == 7 * _MOST_KEPT
    kept.stand(10**6, still=True)
    assert kept.since(10**6 - 1, 10**6 + 30) == 30
    kept.stand(10**6 + 40, still=False)
    assert len(kept._ended) == _MOST_KEPT, "a year of pauses takes no more memory than these"
    assert kept.since(10**6 - 1, 10**6 + 50) == 40
