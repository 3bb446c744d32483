"""Knobs of the unmask rules, and their device half on batches of rows with blocks of their own."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine_service.decoding import rules, settle
from engine_service.decoding.block_diffusion import BlockDiffusion
from engine_service.decoding.knobs import reject_unknown
from engine_service.decoding.reveal import RevealTables
from engine_service.decoding.reveal_knobs import RevealKnobs, one_by_one, read_knobs, remembers
from engine_service.decoding.reveal_knobs import with_defaults as over_defaults
from engine_service.decoding.rules import RULES
from engine_service.sampling.batch import DecideBatch, DecideResult
from engine_service.sampling.head import KnownLogits
from engine_service.sampling.tables import SamplingTables
from tests.equivalence.references import random_knobs, show, with_defaults
from tests.equivalence.rule_reference import READS, START, slow_adapt, slow_rule
from tests.sampling_batches import Row, make_tables, make_wants
from tidemill.runtime.errors import InvalidRequest

VOCAB, MASK, WIDTH, LENGTH = 12, 11, 9, 40
GOOD = {
    "threshold": 0.5,
    "steps": 3,
    "factor": 0.7,
    "entropy_bound": 0.2,
    "max_parallel": 2,
    "start_threshold": 0.7,
    "low_threshold": 0.3,
    "alg_temp": 0.4,
}


def test_every_rule_takes_its_knobs_and_keeps_the_others_defaults() -> None:
    for name, reads in READS.items():
        given = {knob: GOOD[knob] for knob in reads}
        knobs = read_knobs({"remasking": name, **given}, max_steps=4)
        assert knobs == RevealKnobs(remasking=name, **{"steps": 4, **given})


@pytest.mark.parametrize("name", RULES)
def test_a_knob_that_the_rule_does_not_read_is_refused(name: str) -> None:
    for knob in GOOD.keys() - set(READS[name]):
        with pytest.raises(InvalidRequest, match="not read by") as refused:
            read_knobs({"remasking": name, knob: GOOD[knob]}, max_steps=4)
        assert refused.value.param == f"decoding.params.{knob}"
        assert repr(name) in refused.value.message
        readers = refused.value.message.split(": ")[-1].rstrip(".").split(", ")
        assert readers == [rule for rule in RULES if knob in READS[rule]]


@pytest.mark.parametrize("turn", [1, -1])
def test_of_several_wrong_knobs_the_same_is_named_in_any_order(turn: int) -> None:
    """Those of a protobuf come in any."""
    several = dict([("zeta", 1), ("alpha", 1), ("factor", 1), ("alg_temp", 1)][::turn])
    with pytest.raises(InvalidRequest) as refused:
        reject_unknown(several, RevealKnobs, "block_diffusion")
    assert refused.value.param == "decoding.params.alpha"
    with pytest.raises(InvalidRequest) as refused:
        read_knobs({"remasking": "threshold"} | several, max_steps=4)
    assert refused.value.param == "decoding.params.alg_temp"
    with pytest.raises(InvalidRequest) as refused:
        one_by_one(read_knobs({}, max_steps=4), several)
    assert refused.value.param == "decoding.params.alg_temp"


BAD = [
    ({"remasking": "best"}, "remasking", "one of threshold, factor, "),
    ({"threshold": -0.1}, "threshold", "at least 0"),
    ({"threshold": math.nan}, "threshold", "finite"),
    ({"threshold": True}, "threshold", "True"),
    ({"threshold": 10**400}, "threshold", r"is 10{59}\.\.\.; it must be a finite number"),
    ({"steps": 10**5000}, "steps", "thousands of digits; .*whole number"),
    ({"remasking": "factor", "factor": -1}, "factor", "at least 0"),
    ({"remasking": "factor", "factor": "1"}, "factor", "'1'"),
    ({"remasking": "entropy_bound", "entropy_bound": math.inf}, "entropy_bound", "finite"),
    ({"remasking": "entropy_bound", "entropy_bound": -1e-9}, "entropy_bound", "at least 0"),
    ({"remasking": "adaptive", "max_parallel": 0}, "max_parallel", r"\[1, 65536\]"),
    ({"remasking": "adaptive", "max_parallel": 1.5}, "max_parallel", "whole"),
    ({"remasking": "adaptive", "start_threshold": 0.05}, "start_threshold", r"\[0.1, 0.9\]"),
    ({"remasking": "adaptive", "start_threshold": 0.95}, "start_threshold", r"\[0.1, 0.9\]"),
    ({"remasking": "origin", "steps": 0}, "steps", r"\[1, 4\]"),
    ({"remasking": "random", "steps": 5}, "steps", r"\[1, 4\]"),
    ({"remasking": "entropy", "alg_temp": -0.1}, "alg_temp", "at least 0"),
    ({"remasking": "entropy", "alg_temp": 1e-310}, "alg_temp", "0 or at least 1e-06"),
    ({"remasking": "hierarchical", "low_threshold": -1}, "low_threshold", r"\[0, 0.9\]"),
    (
        {"remasking": "hierarchical", "threshold": 0.5, "low_threshold": 0.6},
        "low_threshold",
        r"\[0, 0.5\]",
    ),
]


@pytest.mark.parametrize(("knobs", "name", "message"), BAD)
def test_a_wrong_value_is_refused_by_name(knobs: dict, name: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        read_knobs(knobs, max_steps=4)
    assert refused.value.param == f"decoding.params.{name}"


@pytest.mark.parametrize(
    ("defaults", "asked", "merged"),
    [
        ({"threshold": 0.5}, {}, {"threshold": 0.5}),
        ({"threshold": 0.5}, {"remasking": "prefix"}, {"threshold": 0.5, "remasking": "prefix"}),
        (
            {"threshold": 0.5, "cache": "dual"},
            {"remasking": "random"},
            {"cache": "dual", "remasking": "random"},
        ),
        ({"threshold": 0.5}, {"steps": 4}, {"remasking": "low_confidence", "steps": 4}),
        ({"remasking": "entropy"}, {"steps": 4}, {"remasking": "entropy", "steps": 4}),
        (
            {"remasking": "entropy", "steps": 8},
            {"threshold": 0.5},
            {"remasking": "entropy", "steps": 8, "threshold": 0.5},
        ),
        ({"threshold": 0.5}, {"remasking": ["x"]}, {"threshold": 0.5, "remasking": ["x"]}),
    ],
)
def test_defaults_of_another_rule_are_left_out(defaults: dict, asked: dict, merged: dict) -> None:
    assert over_defaults(defaults, asked) == merged


def test_the_low_threshold_is_never_above_the_threshold_by_default() -> None:
    knobs = {"remasking": "hierarchical", "threshold": 0.2}
    assert read_knobs(knobs, max_steps=4).low_threshold == 0.2


def test_an_unknown_knob_lists_what_is_known() -> None:
    with pytest.raises(InvalidRequest, match=r"knows: remasking, threshold, steps, factor, "):
        BlockDiffusion(block=4, mask_token_id=MASK).parse({"treshold": 1})


@dataclass
class Block:
    """One row: where its blocks are counted from, and how its present block stands."""

    knobs: dict[str, Any]
    prompt_len: int
    origin: int
    length: int
    seed: int
    step: int = 0
    adapted: float = 0.0
    num_masks: int = 0
    hidden: list[int] = field(default_factory=list)

    def enter(self, first: int) -> None:
        """The block that the answer's position `first` lies in, all masked from there on."""
        stop = first + self.length - (first - self.origin) % self.length
        self.hidden = list(range(first, stop))
        self.num_masks, self.step = len(self.hidden), 0
        self.adapted = self.knobs["start_threshold"]


def random_block(rng: random.Random, number: int) -> Block:
    length, prompt_len = rng.randint(1, WIDTH), rng.randint(1, 12)
    knobs = with_defaults(random_knobs(rng, length, tuple(RULES)), length)
    origin = rng.choice([0, prompt_len])
    made = Block(knobs, prompt_len, origin, length, seed=number)
    made.enter(prompt_len)
    return made


def make_batch(logits: torch.Tensor, tables: SamplingTables, live: list[Block]) -> DecideBatch:
    """Spans of all rows in another order than the table's, and padding as CUDA graphs have it."""
    order = sorted(range(len(live)), key=lambda row: -len(live[row].hidden))
    trash = len(live)
    ranges = [(live[row].hidden[0], live[row].hidden[-1] + 1) for row in order]
    positions = [p for start, stop in ranges for p in range(start, stop)]
    ends = torch.tensor([stop - start for start, stop in ranges]).cumsum(0).tolist()
    rows = [row for row, (a, b) in zip(order, ranges, strict=True) for _ in range(a, b)]
    spare = 5
    total = len(positions) + spare
    return DecideBatch(
        logits=KnownLogits(logits[:total]),
        rows=torch.tensor(rows + [trash] * spare),
        positions=torch.tensor(positions + [0] * spare),
        span_rows=torch.tensor([*order, trash, trash]),
        cu_decide=torch.tensor([0, *ends, ends[-1], total]),
        tables=tables,
        wants=make_wants([Row()]),
    )


def admit(device_half: RevealTables, rows: list[int], blocks: list[Block]) -> None:
    device_half.admit(
        rows,
        [RevealKnobs(**block.knobs) for block in blocks],
        steps_taken=[block.step for block in blocks],
        block_starts=[b.hidden[0] - (b.hidden[0] - b.origin) % b.length for b in blocks],
        origins=[block.origin for block in blocks],
        blocks=[block.length for block in blocks],
    )


def check_step(batch: DecideBatch, result: DecideResult, blocks: list[Block]) -> None:
    """Compares with the reference and moves the blocks on."""
    assert result.final is not None
    for index, row in enumerate(batch.span_rows.tolist()[: len(blocks)]):
        block = blocks[row]
        own = slice(*batch.cu_decide[index : index + 2].tolist())
        logits = dict(zip(batch.positions[own].tolist(), batch.logits_NV[own], strict=True))
        for line in logits.values():
            line[MASK] = -torch.inf
        best = {p: int(line.argmax()) for p, line in logits.items()}
        chosen = [best[p] for p in block.hidden]
        shown = show(logits, block.hidden, chosen, block.seed, block.step)
        places = slow_rule(
            shown,
            num_masks=block.num_masks,
            step=block.step,
            knobs=block.knobs,
            adapted=block.adapted,
        )
        falls = {block.hidden[place] for place in places}
        stays = set(block.hidden) - falls
        assert result.final[own].tolist() == [p not in stays for p in logits], block
        decided = dict(zip(logits, result.token_ids[own].tolist(), strict=True))
        assert {p: decided[p] for p in falls} == {p: best[p] for p in falls}
        assert all(decided[p] == MASK for p in stays)
        block.adapted = slow_adapt(block.adapted, len(falls), len(block.hidden))
        block.hidden, block.step = sorted(stays), block.step + 1


@pytest.mark.parametrize("looks", [True, False], ids=["as on the CPU", "as on CUDA"])
def test_rows_with_blocks_and_rules_of_their_own(
    looks: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not looks:
        for module in (rules, settle):
            monkeypatch.setattr(module, "present", lambda _, kinds: set(kinds))
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    blocks = [random_block(rng, number) for number in range(30)]
    lines = [Row(prompt_len=block.prompt_len, seed=block.seed) for block in blocks]
    tables = make_tables([*lines, Row()], banned=(MASK,), width=LENGTH)
    tables.tokens[:] = MASK
    device_half = RevealTables(len(blocks), torch.device("cpu"), mask_token_id=0)
    admit(device_half, list(range(len(blocks))), blocks)
    num_blocks = resumed = 0
    for _ in range(40):
        scale = rng.choice([1.0, 3.0, 8.0])
        shape = (len(blocks) * WIDTH + 5, VOCAB)
        logits = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        batch = make_batch(logits, tables, blocks)
        check_step(batch, device_half.decide(batch, width=WIDTH), blocks)
        for row, block in enumerate(blocks):
            if not block.hidden:
                # The next block of the row, or a new request once the row is full.
                first = int(tables.fixed[row].sum()) + block.prompt_len
                is_full = first + block.length > LENGTH
                block.enter(block.prompt_len if is_full else first)
                tables.fixed[row] &= not is_full
                tables.tokens[row, block.hidden] = MASK
                num_blocks += 1
            elif rng.random() < 0.2 and not remembers(RevealKnobs(**block.knobs)):
                # Somebody else had the row meanwhile.
                states = device_half._state.rows
                states.rules[row], states.limits[row] = 1, 0.5
                states.progress[row] = 3
                admit(device_half, [row], [block])
                resumed += 1
    assert num_blocks > 100
    assert resumed > 10


def test_the_schedule_of_a_dynamic_rule_leaves_out_the_prompt() -> None:
    """Two of eight positions are masks: one in each of two steps."""
    knobs = {"remasking": "low_confidence_dynamic", "threshold": 1.5, "steps": 2}
    block = Block(with_defaults(knobs, 8), 6, 0, 8, seed=0)
    block.enter(6)
    tables = make_tables([Row(prompt_len=6), Row()], banned=(MASK,), width=LENGTH)
    tables.tokens[:] = MASK
    device_half = RevealTables(1, torch.device("cpu"), mask_token_id=0)
    admit(device_half, [0], [block])
    for left in (1, 0):
        logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(left))
        batch = make_batch(logits, tables, [block])
        check_step(batch, device_half.decide(batch, width=8), [block])
        assert len(block.hidden) == left


def test_the_adaptive_threshold_moves_within_its_limits(seed: int) -> None:
    rng, masked = random.Random(seed), torch.ones(1, 10, dtype=torch.bool)
    for few, many in ((0, 2), (3, 7), (8, 10), (0, 10)):
        threshold, slow = torch.tensor([START], dtype=torch.float64), START
        for _ in range(20):
            count = rng.randint(few, many)
            take = torch.arange(10)[None] < count
            threshold = settle.adapt(threshold, take, masked)
            slow = slow_adapt(slow, count, 10)
            assert threshold.item() == slow
        assert slow == {2: 0.1, 7: START, 10: 0.9 if few else slow}[many]


def test_a_block_whose_rule_remembers_is_not_taken_up_half_way() -> None:
    assert [name for name in RULES if remembers(read_knobs({"remasking": name}, max_steps=4))] == [
        "adaptive"
    ]
    knobs = read_knobs({"remasking": "adaptive"}, max_steps=4)
    half_way: dict[str, Any] = {"steps_taken": [1], "block_starts": [4], "origins": [0]}
    with pytest.raises(AssertionError, match="half way"):
        RevealTables(1, torch.device("cpu"), mask_token_id=0).admit(
            [0], [knobs], blocks=[4], **half_way
        )
