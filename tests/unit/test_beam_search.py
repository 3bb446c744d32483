"""Beam search is that of transformers: the same hypotheses in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from frontend.beam_search import BeamSearch, Hypothesis, num_candidates
from frontend.messages import TokenLogprobs
from frontend.request import Beam

transformers: Any = pytest.importorskip("transformers")

VOCAB, ENDS = 12, (2, 9)
PROMPTS = [[1, 5, 9], [2], [8, 8, 4, 0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Random weights that are far from even, so that some beams end and others do not."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, eos_token_id=list(ENDS),
        initializer_range=1.0, tie_word_embeddings=False,
    )  # fmt: skip
    folder = Path(tmp_path_factory.mktemp("beam"))
    made = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(0.08)
    made.save_pretrained(folder)
    return made


@cache
def reference(
    model: Any, prompt: tuple[int, ...], beam: Beam, ends: tuple[int, ...], max_tokens: int
) -> list[list[int]]:
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=beam.width,
        num_return_sequences=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
    )
    rows = [row[len(prompt) :].tolist() for row in found]
    return [cut(row, ends) for row in rows]


def cut(row: list[int], ends: tuple[int, ...]) -> list[int]:
    """Without the padding behind a stop token."""
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1]
    return row


@cache
def ranked(model: Any, tokens: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """The whole vocabulary: most searches come to the same beams."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -1].float()
    values, ids = logits.log_softmax(-1).sort(descending=True)
    return ids.tolist(), values.tolist()


def scored(model: Any, tokens: Sequence[int], count: int) -> TokenLogprobs:
    ids, values = ranked(model, tuple(tokens))
    return TokenLogprobs((ids[0], *ids[:count]), (values[0], *values[:count]), 1)


def ours(
    model: Any, prompt: list[int], beam: Beam, ends: tuple[int, ...], max_tokens: int
) -> list[list[int]]:
    search = BeamSearch(beam, ends=frozenset(ends), max_tokens=max_tokens)
    count = num_candidates(beam, ends)
    num_rounds = 0
    while not search.is_done:
        search.advance([scored(model, [*prompt, *one.token_ids], count) for one in search.running])
        num_rounds += 1
    assert num_rounds <= max_tokens
    found = search.best(beam.width)
    for one in found:
        assert one.logprob == pytest.approx(sum(entry.logprobs[0] for entry in one.entries))
        assert [entry.token_ids[0] for entry in one.entries] == list(one.token_ids)
        assert one.has_ended == (one.token_ids[-1] in ends)
    return [list(one.token_ids) for one in found]


CASES = [
    (Beam(width, penalty, stopping), ends, max_tokens)
    for width in (1, 2, 4)
    for penalty in (1.0, 0.0, 2.0, -1.0)
    for stopping in (False, True)
    for ends in ((), ENDS[:1], ENDS)
    for max_tokens in (1, 2, 7)
]


@pytest.mark.parametrize(("beam", "ends", "max_tokens"), CASES)
def test_hypotheses_are_those_of_transformers(
    model: Any, beam: Beam, ends: tuple[int, ...], max_tokens: int
) -> None:
    # transformers' num_beams=1 is greedy search, which knows no other knob.
    theirs = Beam(1) if beam.width == 1 else beam
    for prompt in PROMPTS:
        wanted = reference(model, tuple(prompt), theirs, ends, max_tokens)
        assert ours(model, prompt, beam, ends, max_tokens) == wanted


@pytest.mark.parametrize(
    "other", [Beam(4, -1.0), Beam(4, 3.0), Beam(4, early_stopping=True), Beam(3)]
)
def test_control_every_knob_counts(model: Any, other: Beam) -> None:
    found = [
        [ours(model, prompt, beam, ENDS, 7)[:3] for prompt in PROMPTS] for beam in (Beam(4), other)
    ]
    assert found[0] != found[1]


def test_only_what_is_looked_at_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is as long as what it goes on from: of all alternatives they stopped everybody."""
    copied: list[int] = []
    whole = Hypothesis.extended

    def counted(
        one: Hypothesis, entry: TokenLogprobs, index: int, ends: frozenset[int]
    ) -> Hypothesis:
        copied.append(index)
        return whole(one, entry, index, ends)

    monkeypatch.setattr(Hypothesis, "extended", counted)
    beam, ends = Beam(3), frozenset(ENDS)
    search = BeamSearch(beam, ends=ends, max_tokens=9)
    likely = TokenLogprobs((0, *range(10, 30)), (0.0, *(-float(i) for i in range(1, 21))), 1)
    for _ in range(3):
        copied.clear()
        search.advance([likely] * len(search.running))
        assert len(copied) == num_candidates(beam, ends)


@pytest.mark.parametrize("penalty", [100.0, -100.0])
def test_powers_of_long_answers_that_no_float_holds_end_no_search(penalty: float) -> None:
    search = BeamSearch(Beam(1, penalty), ends=frozenset(), max_tokens=2000)
    scored = TokenLogprobs((1, 1, 2), (-0.1, -0.1, -9.0), 1)
    while not search.is_done:
        search.advance([scored])
    (found,) = search.best(1)
    assert found.token_ids == (1,) * 2000
