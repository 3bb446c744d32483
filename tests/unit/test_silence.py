"""Who is taken for silent, and who is not."""

from __future__ import annotations

from engine_service.ranks.silence import LOADING_S, SERVING_S, TICK_S, Silence


def ticks(silence: Silence, beat: int, seconds: float, *, serves: bool) -> None:
    for _ in range(int(seconds / TICK_S)):
        silence.look(beat, TICK_S, serves=serves)


def test_a_rank_that_serves_may_be_silent_for_less_than_one_that_loads() -> None:
    silence = Silence()
    ticks(silence, 7, LOADING_S, serves=False)
    assert not silence.is_long
    ticks(silence, 7, 1.0, serves=False)
    assert silence.is_long
    ticks(silence, 8, SERVING_S, serves=True)
    assert not silence.is_long
    ticks(silence, 8, 1.0, serves=True)
    assert silence.is_long


def test_what_was_silence_of_loading_is_forgiven_when_a_rank_serves() -> None:
    silence = Silence()
    ticks(silence, 7, 2 * SERVING_S, serves=False)
    silence.look(7, TICK_S, serves=True)
    assert not silence.is_long


def test_a_look_that_comes_late_counts_as_two_ticks() -> None:
    silence = Silence()
    silence.look(7, 0.0, serves=True)
    silence.look(7, 60.0, serves=True)
    assert silence.seconds == 2 * TICK_S
