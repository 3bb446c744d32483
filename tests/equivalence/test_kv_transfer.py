"""A prompt computed by one engine and continued by another gives the tokens of one engine, for all
kinds of architectures whose prompts have keys and values of their own; and what fails how."""

from __future__ import annotations

import json
import random
import struct
import zlib
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_service.composition import Engine, compose
from engine_service.config import EngineConfig
from engine_service.core.handoff import (
    BeginTransfer,
    Begun,
    EndTransfer,
    Exported,
    ExportPages,
    HasRoom,
    ImportPages,
    InlinePiece,
)
from engine_service.core.messages import Finish, Submit
from engine_service.core.params import DecodingChoice, SamplingParams
from engine_service.pieces import Files, Views, inlined, laid
from tests.equivalence.shapes import SHAPES, VOCAB
from tidemill.runtime.errors import FailedPrecondition, Unsupported

PAGE = 8
MOVED = [name for name, shape in SHAPES.items() if "steps" not in shape.knobs]
"""Every architecture but those whose positions all see each other, which are refused below."""
LENGTHS = (8, 9, 16, 17, 40)
COUNT = 10
ROLES = ("prefill", "decode")


def make(folder: Path, name: str, role: str, **flags: Any) -> Engine:
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(SHAPES[name].config))
    base = {"load_format": "dummy", "device": "cpu", "max_rows": 2, "max_model_len": 64}
    chosen = EngineConfig(
        model=str(folder), seed=3, page_size=PAGE, **{**base, "role": role, **flags}
    )
    return compose(chosen, lambda *stage: None)


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def run(
    engine: Engine, prompt: list[int], *, only_prefills: bool = False, **sampling: Any
) -> tuple[list[int], Finish]:
    wishes = {"temperature": 0.0, "ignore_eos": True, "max_tokens": COUNT} | sampling
    engine.scheduler.submit(
        Submit(
            key=1,
            request_id="1",
            prompt=pack(prompt),
            sampling=SamplingParams(**wishes),
            decoding=DecodingChoice(),
            only_prefills=only_prefills,
        )
    )
    tokens: list[int] = []
    while True:
        plan = engine.scheduler.schedule()
        assert plan is not None
        engine.scheduler.apply(plan, engine.executor.collect(engine.executor.launch(plan)))
        engine.scheduler.check_integrity()
        output = engine.scheduler.emit()
        if output is not None:
            tokens += array("I", output.token_ids)
            for _, finish in output.finished:
                assert engine.scheduler.load.pages_used == 0
                return tokens, finish


def ask(engine: Engine, what: Any) -> Any:
    assert engine.transfers is not None
    answer = engine.transfers.take(what)
    assert engine.scheduler.load.pages_used == 0, "a transfer holds pages"
    return answer


FILES, VIEWS = Files(), Views()
"""Of a server, which gives the core what came in messages."""


def move(source: Engine, target: Engine, prompt: list[int], spoil: Any = None) -> int:
    """Fetches what `target` lacks of a prompt, in pieces of two units; how many tokens that is."""
    here: Begun = ask(target, BeginTransfer(pack(prompt), "", "", True))
    if here.num_found >= here.num_tokens:
        return 0
    run(source, prompt[: here.num_tokens], only_prefills=True, max_tokens=1)
    there: Begun = ask(source, BeginTransfer(pack(prompt[: here.num_tokens]), "", "", False))
    assert there.num_found == there.num_tokens == here.num_tokens
    at = here.num_found
    while at < here.num_tokens:
        got: Exported = ask(source, ExportPages(there.transfer, at, 2 * there.unit_bytes))
        assert got.piece is not None
        piece = got.piece
        if spoil is not None:
            piece = laid(FILES, there.transfer, spoil(inlined(VIEWS, piece)))
        assert ask(target, ImportPages(here.transfer, at, got.num_tokens, piece))
        at += got.num_tokens
    for engine, begun in ((source, there), (target, here)):
        ask(engine, EndTransfer(begun.transfer))
    return at - here.num_found


@pytest.mark.parametrize("name", MOVED)
def test_moved_prompts_go_on_as_one_engine(tmp_path: Path, name: str) -> None:
    check_moved(tmp_path, name)


def check_moved(folder: Path, name: str, **flags: Any) -> None:
    """Prompts of all kinds of lengths, moved from one engine to another."""
    one, source, target = (make(folder, name, role, **flags) for role in ("both", *ROLES))
    rng = random.Random(name)
    stem = [rng.randrange(VOCAB - 8) for _ in range(PAGE)]
    for length in LENGTHS:
        for wishes in SHAPES[name].sampling[:2]:
            prompt = [rng.randrange(VOCAB - 8) for _ in range(length)]
            if length > 2 * PAGE:  # a page that is there already is not moved again
                prompt[:PAGE] = stem
            moved = move(source, target, prompt)
            tokens, finish = run(target, prompt, **wishes)
            assert tokens == run(one, prompt, **wishes)[0], (length, wishes)
            assert moved in (finish.usage.cached_tokens, finish.usage.cached_tokens - PAGE)
            assert (moved > 0) == (length > PAGE or finish.usage.cached_tokens > 0)
            assert length - finish.usage.cached_tokens <= PAGE


def test_what_is_moved_is_what_decides(tmp_path: Path) -> None:
    """Other bytes under a right CRC give other tokens; under a wrong one they are refused, and what
    was there before goes on to be right."""
    one, source, target = (make(tmp_path, "qwen3", role) for role in ("both", "prefill", "decode"))
    prompt = list(range(3, 3 + 4 * PAGE + 1))

    def flip(piece: InlinePiece) -> InlinePiece:
        content = bytearray(piece.content)
        content[len(content) // 2] ^= 0x40
        return replace(piece, content=bytes(content))

    with pytest.raises(FailedPrecondition, match="CRC-32") as caught:
        move(source, target, prompt, flip)
    assert caught.value.reason == "KV_PIECE"
    right = run(one, prompt)[0]
    tokens, finish = run(target, prompt)
    assert (tokens, finish.usage.cached_tokens) == (right, 0)

    def forge(piece: InlinePiece) -> InlinePiece:
        other = bytes(len(piece.content))
        return InlinePiece(other, zlib.crc32(other))

    other = make(tmp_path, "qwen3", "decode")
    assert move(source, other, prompt, forge) == 4 * PAGE
    assert run(other, prompt)[0] != right


def test_what_is_evicted_is_computed(tmp_path: Path) -> None:
    """Pages that go while they are moved end the transfer early, on either side, and no token
    differs; a full pool takes nothing."""
    source, target = (make(tmp_path, "qwen3", role, num_pages=8) for role in ("prefill", "decode"))
    prompt = list(range(3, 3 + 4 * PAGE + 1))
    right = run(make(tmp_path, "qwen3", "both"), prompt)[0]
    run(source, prompt, only_prefills=True, max_tokens=1)
    there = ask(source, BeginTransfer(pack(prompt), "", "", False))
    here = ask(target, BeginTransfer(pack(prompt), "", "", True))
    size = there.unit_bytes
    first = ask(source, ExportPages(there.transfer, 0, size))
    assert ask(target, ImportPages(here.transfer, 0, PAGE, first.piece))
    second = ask(source, ExportPages(there.transfer, PAGE, size))
    source.scheduler.flush_cache()
    assert ask(source, ExportPages(there.transfer, 2 * PAGE, size)) == Exported(0, None)
    target.scheduler.flush_cache()
    assert not ask(target, ImportPages(here.transfer, PAGE, PAGE, second.piece)), "behind a gap"
    assert run(target, prompt)[0] == right
    for start, wrong in ((0, 0), (0, 3), (0, 9 * PAGE), (3, PAGE), (3, PAGE - 3)):
        with pytest.raises(FailedPrecondition, match="in units of 8"):
            ask(target, ImportPages(here.transfer, start, wrong, first.piece))
    target.scheduler.flush_cache()
    with pytest.raises(FailedPrecondition, match="bytes of KV came"):
        ask(target, ImportPages(here.transfer, 0, 2 * PAGE, first.piece))
    ask(target, EndTransfer(here.transfer))
    with pytest.raises(FailedPrecondition, match="is over"):
        ask(target, ImportPages(here.transfer, 0, PAGE, first.piece))


def test_room_is_what_running_rows_leave(tmp_path: Path) -> None:
    """Pages that nobody holds are room, those of a row are not; nobody waits for more than all."""
    target = make(tmp_path, "qwen3", "decode", num_pages=8)
    prompt = list(range(3, 3 + 4 * PAGE + 1))
    run(target, [1, *prompt], max_tokens=1)
    here: Begun = ask(target, BeginTransfer(pack(prompt), "", "", True))
    assert here.has_room, "what is only remembered is evicted"
    pages = target.scheduler._pages
    held = pages.open(1)
    assert pages.reserve(held, 5 * PAGE)
    late: Begun = target.transfers.take(BeginTransfer(pack(prompt), "", "", True))
    huge: Begun = target.transfers.take(BeginTransfer(pack(prompt * 3), "", "", True))
    look = HasRoom(late.transfer)
    assert not late.has_room
    assert target.transfers.take(look) == {"num_found": 0, "has_room": False}
    assert (huge.num_tokens, huge.has_room) == (0, True), "it never fits, which the core says"
    pages.release(held)
    assert target.transfers.take(look) == {"num_found": 0, "has_room": True}


@pytest.mark.parametrize("name", ["qwen3", "sdar"])
def test_prompts_with_one_beginning_are_moved_at_once(tmp_path: Path, name: str) -> None:
    """A piece of which another transfer has brought some already is wanted for the rest of it."""
    one, source, target = (make(tmp_path, name, role) for role in ("both", "prefill", "decode"))
    rng = random.Random(name)

    def draw(count: int) -> list[int]:
        return [rng.randrange(VOCAB - 8) for _ in range(count)]

    stem = draw(2 * PAGE)
    prompts = [[*stem, *draw(2 * PAGE + 3)] for _ in range(2)]
    began = [ask(target, BeginTransfer(pack(prompt), "", "", True)) for prompt in prompts]
    for prompt, here in zip(prompts, began, strict=True):
        assert (here.num_found, here.num_tokens) == (0, 4 * PAGE)
        run(source, prompt[: here.num_tokens], only_prefills=True, max_tokens=1)
        there = ask(source, BeginTransfer(pack(prompt[: here.num_tokens]), "", "", False))
        for at, count in ((0, 3), (3, 1)):
            most = count * there.unit_bytes
            got = ask(source, ExportPages(there.transfer, at * PAGE, most))
            piece = ImportPages(here.transfer, at * PAGE, got.num_tokens, got.piece)
            assert ask(target, piece), "the rest of it has room"
    for prompt in prompts:
        tokens, finish = run(target, prompt)
        assert (tokens, finish.usage.cached_tokens) == (run(one, prompt)[0], 4 * PAGE)


@pytest.mark.parametrize(
    ("name", "flags", "why"),
    [
        ("llada", {}, "every position of this model sees all others"),
        ("llada-moe", {}, "every position of this model sees all others"),
        ("dream", {}, "every position of this model sees all others"),
        ("qwen3", {"prefix_caching": False}, "prefix_caching is off"),
        ("qwen3", {"executor": "simulated"}, "simulated executor keeps no keys"),
    ],
)
def test_engines_without_pages_to_move_are_refused(
    tmp_path: Path, name: str, flags: dict[str, Any], why: str
) -> None:
    with pytest.raises(Unsupported, match=why) as caught:
        make(tmp_path, name, "prefill", **flags)
    assert caught.value.param == "role"
