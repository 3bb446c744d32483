"""What a request says of how its masks fall: the unmask rule, the rule's knobs, and editing.

It does not know tokens, tensors or a method's own knobs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from engine_service.core.params import MethodParams
from engine_service.decoding.knobs import (
    read_choice,
    read_flag,
    read_number,
    read_whole,
    wrong_knob,
)
from engine_service.decoding.rules import RULES, Count
from tidemill.runtime.errors import InvalidRequest

_MAX_POST = 1024
_LEAST_WARMTH = 1e-6
_NEVER_REACHED = 2.0
"""A threshold: no probability is as high, and a rule that finds none takes one position."""
MAX_PARALLEL = 1 << 16
"""Largest `max_parallel`: more positions than any block has."""


LEAST_START, MOST_START = 0.1, 0.9
"""Between them the adaptive rule's threshold moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevealKnobs(MethodParams):
    """What a rule needs to know of a request. Knobs that it does not read keep their defaults."""

    remasking: str
    """Name of the rule (rules.RULES)."""
    threshold: float = 0.9
    """Least confidence; above 1 one position is revealed per step."""
    steps: int
    """Steps per block of the rules with a schedule; they need not divide the masks."""
    factor: float = 1.0
    entropy_bound: float = 0.1
    """Nats."""
    max_parallel: int = 8
    """Most positions per step."""
    start_threshold: float = 0.3
    """Of every block; it adapts from there."""
    low_threshold: float = 0.4
    """Confidence above which the best position of every run of masks is revealed."""
    alg_temp: float = 0.0
    """Temperature of the choice of positions (Dream's); 0: the best ones."""
    eos_last: bool = False
    """What ends the answer does not count in how sure a choice is, and a position whose choice it
    is falls when no other is left (LLaDA's confidence_eos_eot_inf). Where tokens are drawn that
    holds, as there, for what ends a turn (EoT), or for all ends of a model that has no such token.
    random, origin and sequential do not look at it. No graph decides for such a row."""
    edit_threshold: float | None = None
    """Probability above which another token takes the place of a revealed one; None: never."""
    max_post_edit_steps: int = 16
    """Steps that edit on when no mask is left; fewer, as soon as nothing changes."""

    @property
    def holds_ends(self) -> bool:
        """eos_last, in words that the worker shares."""
        return self.eos_last


_OF_ALL = {"remasking", "eos_last", "edit_threshold", "max_post_edit_steps"}
_OF_RULES = frozenset(field.name for field in fields(RevealKnobs)) - _OF_ALL


def rule_of(knobs: dict[str, Any]) -> Any:
    """The rule that knobs ask for, by name or, as LLaDA's users do, by the number of steps."""
    return knobs.get("remasking", "low_confidence" if "steps" in knobs else "threshold")


def with_defaults(defaults: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """A request's knobs over default ones; defaults of a rule that is not its own are left out."""
    own = rule_of(asked if "remasking" in asked else {**defaults, **asked})
    if (
        not isinstance(own, str)
        or own not in RULES
        or asked.keys().isdisjoint({"remasking", "steps"})
    ):
        return {**defaults, **asked}
    if "steps" in asked and "remasking" not in asked and "steps" not in RULES[own].reads:
        own = "low_confidence"
    kept = {k: v for k, v in defaults.items() if k not in _OF_RULES or k in RULES[own].reads}
    return {**kept, "remasking": own, **asked}


def read_knobs(knobs: dict[str, Any], *, max_steps: int) -> RevealKnobs:
    """Checked knobs; names that RevealKnobs does not have are the method's own and not looked at.

    `steps` is at most and by default `max_steps`. Raises InvalidRequest for a wrong value, and for
    a knob that the rule would ignore.
    """
    name = read_choice("remasking", rule_of(knobs), tuple(RULES))
    _reject_unread(name, knobs)
    threshold = read_number("threshold", knobs.get("threshold", 0.9), low=0.0)
    low_threshold = knobs.get("low_threshold", min(0.4, threshold))
    return RevealKnobs(
        remasking=name,
        threshold=threshold,
        steps=read_whole("steps", knobs.get("steps", max_steps), low=1, high=max_steps),
        factor=read_number("factor", knobs.get("factor", 1.0), low=0.0),
        entropy_bound=read_number("entropy_bound", knobs.get("entropy_bound", 0.1), low=0.0),
        max_parallel=read_whole(
            "max_parallel", knobs.get("max_parallel", 8), low=1, high=MAX_PARALLEL
        ),
        start_threshold=read_number(
            "start_threshold", knobs.get("start_threshold", 0.3), low=LEAST_START, high=MOST_START
        ),
        low_threshold=read_number("low_threshold", low_threshold, low=0.0, high=threshold),
        alg_temp=_read_warmth(knobs.get("alg_temp", 0.0)),
        eos_last=read_flag("eos_last", knobs.get("eos_last", False)),
        **_read_editing(knobs),
    )


def _read_warmth(value: Any) -> float:
    """0, or no less than what keeps every score finite: positions that are closed have -inf."""
    if read_number("alg_temp", value, low=0.0) and value < _LEAST_WARMTH:
        raise wrong_knob("alg_temp", value, f"0 or at least {_LEAST_WARMTH:g}")
    return float(value)


def _read_editing(knobs: dict[str, Any]) -> dict[str, Any]:
    """Nothing for requests that do not edit."""
    least, steps = knobs.get("edit_threshold"), knobs.get("max_post_edit_steps")
    if least is None:
        if steps is not None:
            raise wrong_knob("max_post_edit_steps", steps, "left out without edit_threshold")
        return {}
    most = {} if steps is None else {"max_post_edit_steps": steps}
    return {
        "edit_threshold": read_number("edit_threshold", least, low=0.0, high=1.0),
        **{name: read_whole(name, value, low=0, high=_MAX_POST) for name, value in most.items()},
    }


def _reject_unread(name: str, knobs: dict[str, Any]) -> None:
    """Raises InvalidRequest naming the first knob, by name as in reject_unknown, that the rule does
    not read, and who does."""
    for knob in sorted(knobs):
        if knob in _OF_RULES and knob not in RULES[name].reads:
            readers = ", ".join(rule for rule in RULES if knob in RULES[rule].reads)
            raise InvalidRequest(
                f"The decoding parameter {knob} is not read by remasking {name!r}; leave it out, or"
                f" choose a rule that reads it: {readers}.",
                param=f"decoding.params.{knob}",
            )


def one_by_one(knobs: RevealKnobs, asked: dict[str, Any]) -> RevealKnobs:
    """The knobs that reveal the leftmost mask in every step, as a constraint needs it.

    Raises InvalidRequest for knobs of the caller's own that say how masks fall.
    """
    for name in sorted(asked):
        if name in _OF_ALL | _OF_RULES:
            raise InvalidRequest(
                f"decoding.params.{name} says how masks fall, but where what may follow depends on "
                "what was chosen they fall one at a time from the left; leave it out, or leave out "
                "the constraint (a grammar, or bad_words of several tokens).",
                param=f"decoding.params.{name}",
            )
    return RevealKnobs(remasking="prefix", threshold=_NEVER_REACHED, steps=knobs.steps)


def remembers(knobs: RevealKnobs) -> bool:
    """Whether the rule depends on how the block went so far, not on what is open and the step.

    Such a block cannot be taken up half way: a preempted request starts it anew.
    """
    return RULES[knobs.remasking].count is Count.AT_MOST or knobs.edit_threshold is not None
