"""Which trigger of a structural tag begins a text."""

from __future__ import annotations

import random
import time

from engine_service.constraints.triggers import trigger_finder


def test_the_first_trigger_that_begins_a_text_is_found(seed: int) -> None:
    draw = random.Random(seed)

    def text(most: int) -> str:
        return "".join(draw.choices("ab", k=draw.randrange(most)))

    for _ in range(300):
        triggers, begin = [text(4) for _ in range(draw.randrange(6))], text(6)
        first = next((one for one in triggers if one and begin.startswith(one)), None)
        assert trigger_finder(triggers)(begin) == first


def test_many_triggers_and_many_texts_take_no_minutes() -> None:
    """What a grammar of a megabyte has room for."""
    find = trigger_finder([f"<{number}>" for number in range(50_000)])
    began = time.process_time()
    assert {find("<function=") for _ in range(10_000)} == {None}
    assert time.process_time() - began < 1.0
