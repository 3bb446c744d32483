"""`tidemill chat` and its `--canvas`: what is drawn, asked of the server, refused."""

from __future__ import annotations

import asyncio
import io
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.service.frontends import stack
from tests.waiting import until
from tidemill.commands import chat
from tidemill.commands.canvas import CanvasView, usage_line
from tidemill.exchange import Choice, Delta
from tidemill.runtime.errors import Overloaded, Unsupported
from tidemill.security.keys import new_key
from tidemill.v1 import engine_pb2, text_pb2

SHADE, MASK, BLOCK = "\u2591", 999, 8
LETTERS = 'abcdefghijklmnopqrstuvwxyz{}": '


def delta(text: str = "", canvas: Any = None, usage: Any = None) -> Delta:
    fields = {"finish_reason": "", "stop_reason": "", "token_ids": [], "logprobs": []}
    choice = Choice(index=0, text=text, **fields) if text else None
    rest = {"prompt_logprobs": [], "usage": usage, "timings": None}
    return Delta(id="x", choice=choice, canvas=canvas, **rest)


def canvas_event(block: int, step: int, cells: list[tuple[int, bool]]) -> text_pb2.CanvasEvent:
    return text_pb2.CanvasEvent(
        block=block,
        step=step,
        token_ids=[token for token, _ in cells],
        fixed=[is_fixed for _, is_fixed in cells],
        text="".join(SHADE if token == MASK else chr(token) for token, _ in cells),
    )


def drawn(view: CanvasView, width: int = 60, height: int = 25) -> list[tuple[str, str]]:
    """(character, style) of what a terminal gets, without line ends."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=height)
    found = []
    for segment in console.render(view):
        style = str(segment.style) if segment.style else ""
        found += [(c, style if style != "none" else "") for c in segment.text if c != "\n"]
    return found


class Reveal:
    """The slow obvious picture of a random reveal: a state for every position of the answer."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.rng, self.num_committed = rng, 0
        self.text = "".join(rng.choices(LETTERS, k=3 * BLOCK))
        self.fixed = [False] * len(self.text)
        self.drawn = [False] * len(self.text)

    def deltas(self) -> Iterator[tuple[Delta, list[tuple[str, str]]]]:
        """Each event with the cells that it must leave on the screen."""
        for block in range(3):
            start, step = block * BLOCK, 0
            hidden = list(range(start, start + BLOCK))
            while hidden:
                step += 1
                fresh = self.rng.sample(hidden, self.rng.randint(1, min(4, len(hidden))))
                hidden = [i for i in hidden if i not in fresh]
                for i in fresh:
                    self.fixed[i] = True
                before = self.num_committed
                while self.num_committed < start + BLOCK and self.fixed[self.num_committed]:
                    self.num_committed += 1
                yield self._event(block, step, before, set(fresh))

    def _event(
        self, block: int, step: int, before: int, fresh: set[int]
    ) -> tuple[Delta, list[tuple[str, str]]]:
        now, stop = self.num_committed, (block + 1) * BLOCK
        tail = [
            (ord(self.text[i]) if self.fixed[i] else MASK, self.fixed[i]) for i in range(now, stop)
        ]
        wanted = [
            (c, "bold black on cyan" if i >= before else "") for i, c in enumerate(self.text[:now])
        ]
        for i in range(now, stop):
            style = "bold black on cyan" if i in fresh else "" if self.fixed[i] else "dim"
            wanted.append((self.text[i] if self.fixed[i] else SHADE, style))
        event = canvas_event(block, step, tail) if tail else None
        return delta(self.text[before:now], event), wanted


@pytest.mark.parametrize("number", range(5))
def test_every_frame_is_the_reveal(seed: int, number: int) -> None:
    reveal, asked = Reveal(seed + number), []

    def piece(token_id: int) -> str:
        asked.append(token_id)
        return chr(token_id)

    view = CanvasView(piece)
    num_frames = 0
    for event, wanted in reveal.deltas():
        assert view.take(event) is event
        assert drawn(view) == wanted
        num_frames += 1
    assert num_frames > 5
    assert view.text == reveal.text
    assert len(asked) == len(set(asked)), "a token was asked for twice"
    assert MASK not in asked


def test_a_missed_event_shows(seed: int) -> None:
    """Negative control of the test above."""
    wrong = 0
    for one in range(seed, seed + 8):  # a first event may show nothing but masks
        view = CanvasView(chr)
        for event, wanted in list(Reveal(one).deltas())[1:]:
            view.take(event)
            wrong += drawn(view) != wanted
    assert wrong > 0


def test_an_undecided_token_is_no_mask() -> None:
    view = CanvasView(lambda token_id: f"<{token_id}>" if token_id == MASK else chr(token_id))
    cells = [(MASK, False), (ord("a"), False), (MASK, False), (ord("b"), True)]
    view.take(delta(canvas=canvas_event(0, 1, cells)))
    assert drawn(view) == [
        (SHADE, "dim"),
        ("a", "dim italic"),
        (SHADE, "dim"),
        ("b", "bold black on cyan"),
    ]
    view.take(delta(canvas=canvas_event(0, 2, [(ord("c"), False)] * 2)))
    assert [c for c, _ in drawn(view)] == ["c", "c"]


def test_the_last_lines_fit_the_terminal_and_nothing_steers_it() -> None:
    view = CanvasView(chr)
    view.take(delta("".join(f"line {i}\n" for i in range(50)) + "\x1b[2J\x07end"))
    text = "".join(c for c, _ in drawn(view, width=20, height=6))
    assert text == "line 46line 47line 48line 49\ufffd[2J\ufffdend"
    view.take(delta(canvas=canvas_event(0, 1, [(10, True), (27, True)])))
    assert "".join(c for c, _ in drawn(view, width=20, height=6)).endswith("end\u21b5\ufffd")


def test_usage() -> None:
    usage = engine_pb2.Usage(output_tokens=43, forward_passes=3)
    assert usage_line(usage) == "43 tokens, 3 forwards, 14.33 tokens a forward"
    assert usage_line(engine_pb2.Usage()) == "0 tokens, 0 forwards, 0.00 tokens a forward"


async def test_on_a_terminal_and_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with stack(tmp_path, engine={"mask_token_id": 264}) as served:
        words = ["ab", f"--server={served.grpc_address}", "--max-tokens=4"]
        assert await asyncio.to_thread(chat.run, words) == 0
        plain = capsys.readouterr()
        assert not served.engine.submits[-1].emit_canvas
        assert plain.err == ""

        assert await asyncio.to_thread(chat.run, [*words, "--canvas"]) == 0
        piped = capsys.readouterr()
        assert served.engine.submits[-1].emit_canvas
        assert piped.out == plain.out
        assert piped.err == "4 tokens, 4 forwards, 1.00 tokens a forward\n"

        screen = io.StringIO()
        terminal = Console(file=screen, force_terminal=True, width=40, height=10, _environ={})
        monkeypatch.setattr(chat, "Console", lambda: terminal)
        served.engine.hold_after = 1  # newer tokens would overtake the canvas
        drawing = asyncio.create_task(asyncio.to_thread(chat.run, [*words, "--canvas"]))
        await until(lambda: SHADE in screen.getvalue())
        served.engine.hold_after = None
        assert await drawing == 0
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == (plain.out, piped.err)
        assert SHADE not in plain.out + piped.out


async def test_refusals_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stack(tmp_path) as served:
        served.engine.refuse = Unsupported("no emit_canvas here", param="emit_canvas")
        words = ["ab", f"--server={served.grpc_address}", "--canvas"]
        assert await asyncio.to_thread(chat.run, words) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        assert "leave --canvas out, or talk to a diffusion model" in said.err
        for other in (Unsupported("no such thing", param="stop"), Overloaded("the queue is full")):
            served.engine.refuse = other
            assert await asyncio.to_thread(chat.run, words) == 1
            assert capsys.readouterr().err == f"tidemill chat: {other.message}\n"


async def test_where_a_key_is_wanted_it_names_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = new_key("alice")
    (tmp_path / "keys").write_text(f"{made.line}\n")
    async with stack(tmp_path, api_keys_file=str(tmp_path / "keys")) as served:
        words = ["ab", f"--server={served.grpc_address}"]
        for keys in ([], ["--api-key=wrong"]):
            assert await asyncio.to_thread(chat.run, [*words, *keys]) == 1
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert "--api-key KEY, or the variable TIDEMILL_API_KEY" in said
        assert await asyncio.to_thread(chat.run, [*words, f"--api-key={made.key}"]) == 0


@pytest.mark.parametrize(
    ("server", "flags", "told"),
    [
        ("127.0.0.1:{port}", [], "wants --tls or --tls-ca"),
        ("http://127.0.0.1:{port}", [], "--server HOST:PORT"),
        ("127.0.0.1:{port}", ["--tls"], "takes no --tls-..."),
        ("127.0.0.1:{port}", ["--tls"], "--tls-client-ca wants --tls-cert and --tls-key"),
    ],
)
def test_where_nobody_answers_it_says_what_to_do(
    server: str, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody is there
        taken.bind(("127.0.0.1", 0))
        address = server.format(port=taken.getsockname()[1])
        assert chat.run(["ab", f"--server={address}", *flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"tidemill chat: nobody speaks gRPC at {address}: start a server")
    assert said.count("\n") == 1
    assert told in said
