"""Sequences of tokens that must not appear: what is left of the vocabulary behind each token."""

from __future__ import annotations

import random
import time

from engine_service.core.constraint import Constraint, Vocabulary, to_bits

VOCABULARY = Vocabulary(size=64, never=frozenset({63}))


def constraint(sequences: list[tuple[int, ...]]) -> Constraint:
    return Constraint(
        VOCABULARY,
        matcher=None,
        allowed=None,
        sequences=sequences,
        hidden=0,
        hidden_first=0,
        min_tokens=0,
    )


def mask_of(made: Constraint) -> bytes:
    made.compute(None)
    return made._mask


def test_what_would_end_a_sequence_is_left_out(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        lengths = (draw.randrange(2, 5) for _ in range(draw.randrange(1, 8)))
        sequences = [tuple(draw.randrange(3) for _ in range(length)) for length in lengths]
        made, said = constraint(sequences), list[int]()
        for _ in range(8):
            wrong = {one[-1] for one in sequences if said[1 - len(one) :] == [*one[:-1]]}
            left = VOCABULARY.all_ids & ~to_bits(wrong)
            assert mask_of(made) == VOCABULARY.mask(left)
            said.append(draw.randrange(3))
            made.read(said[-1:], None)


def test_many_long_sequences_cost_a_token_hardly_anything(seed: int) -> None:
    """2 ms, compared one by one: the thread holds the interpreter, and the core waits for it."""
    draw = random.Random(seed)
    made = constraint([tuple(draw.choices(range(60), k=1000)) for _ in range(512)])
    made.read(draw.choices(range(60), k=1200), None)
    began = time.process_time()
    for _ in range(100):
        made.compute(None)
    assert time.process_time() - began < 0.05
