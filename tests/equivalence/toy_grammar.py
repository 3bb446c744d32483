"""Grammars over the toy's vocabulary: random automata, and slow decoding under them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from engine_service.core.params import ConstraintSpec
from tests.equivalence.harness import EOS
from tests.fakes import MASK, VOCAB, ToyModel
from tidemill.runtime.errors import InvalidRequest


class Automaton:
    """States with edges by token; state 0 is the start. Where `accepts` holds, EOS may come."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        size = rng.randint(3, 7)
        tokens = [token for token in range(VOCAB) if token not in (EOS, MASK)]
        self.edges: list[dict[int, int]] = [
            {token: rng.randrange(size) for token in rng.sample(tokens, rng.randint(1, 6))}
            for _ in range(size - 1)
        ]
        self.edges.append({})
        self.accepts = {size - 1, *(state for state in range(size) if rng.random() < 0.3)}

    def allowed(self, state: int) -> list[int]:
        """Tokens that may come."""
        return [*self.edges[state], *([EOS] if state in self.accepts else [])]


def spec(seed: int) -> ConstraintSpec:
    """An automaton as a request asks for it."""
    return ConstraintSpec("regex", str(seed))


class ToyMatcher:
    """core.constraint.Matcher."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton, self.state = automaton, 0
        self.is_complete, self.failure = False, ""

    def accept(self, token_id: int) -> None:
        edges = self.automaton.edges[self.state]
        if token_id in edges:
            self.state = edges[token_id]
            self.is_complete = not self.automaton.edges[self.state]
        elif token_id == EOS and self.state in self.automaton.accepts:
            self.is_complete = True
        else:
            self.failure = f"{token_id} in state {self.state}"


class ToyGrammars:
    """core.constraint.Grammars."""

    def is_compiled(self, spec: ConstraintSpec) -> bool:
        return False

    def compile(self, spec: ConstraintSpec) -> None:
        if not spec.text.isdecimal():
            raise InvalidRequest(f"{spec.text!r} does not compile", param="constraint.regex")

    def open(self, spec: ConstraintSpec) -> ToyMatcher:
        self.compile(spec)
        return ToyMatcher(Automaton(int(spec.text)))

    def masks(self, matchers: Sequence[ToyMatcher]) -> list[bytes]:
        return [
            sum(1 << token for token in one.automaton.allowed(one.state)).to_bytes(8, "little")
            for one in matchers
        ]


def reference(
    model: ToyModel,
    prompt: Sequence[int],
    count: int,
    seed: int,
    block: int | None,
    *,
    shift: int = 0,
) -> list[int]:
    """Greedy tokens under an automaton, everything recomputed for each; `block` None: a causal
    model that predicts the next position, else one that sees masks up to the block's end and
    predicts the position `shift` behind."""
    tokens, automaton, state = list(prompt), Automaton(seed), 0
    for _ in range(count):
        if block is None:
            logits = model.dense(tokens, 1)[-1]
        else:
            end = (len(tokens) // block + 1) * block
            logits = model.dense(tokens + [MASK] * (end - len(tokens)), block)
            logits = logits[len(tokens) - shift]
        wanted = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
        allowed = automaton.allowed(state)
        wanted[allowed] = logits[allowed]
        token = int(wanted.argmax())
        tokens.append(token)
        if token == EOS:
            break
        state = automaton.edges[state][token]
        if not automaton.edges[state]:
            break
    return tokens[len(prompt) :]
