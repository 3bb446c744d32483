"""Draws a streamed answer in the terminal: its text, and the block that is being revealed.

It does not know connections; it is fed deltas, and asks a function for the text of a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tidemill.exchange import Delta

_SHADE = "\u2591"
"""How the server writes a masked position in the text of a canvas."""
_MASKED, _TENTATIVE, _FIXED, _FRESH = "dim", "dim italic", "", "bold black on cyan"


class CanvasView:
    """A picture of one answer for rich; `text` is all of its text up to now, `usage` its cost.

    `piece(token_id)` is the text of a token on its own; it is called once per token id.
    """

    def __init__(self, piece: Callable[[int], str]) -> None:
        self.text = ""
        self.usage: Any = None
        self._new_text = ""
        self._canvas: Any = None
        self._fresh: list[bool] = []
        self._mask_token_id: int | None = None
        self._piece = piece
        self._pieces: dict[int, str] = {}

    def take(self, delta: Delta) -> Delta:
        """Adds the news of one event, which it returns; a canvas is what follows the text."""
        self.text += delta.text
        self._new_text = delta.text
        before, canvas = self._canvas, delta.canvas
        if canvas is not None:
            self._canvas, self._fresh = canvas, _fresh(before, canvas)
            self._find_mask(canvas)
        elif delta.text or delta.usage is not None:
            self._canvas = None  # the block was committed whole, or the answer has ended
        if delta.usage is not None:
            self.usage = delta.usage
        return delta

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The last lines of the picture, as many as the terminal has."""
        lines = self._picture().wrap(console, options.max_width)
        yield from lines[-max(1, options.max_height - 1) :]

    def _picture(self) -> Text:
        num_old = len(self.text) - len(self._new_text)
        picture = Text(_printable(self.text[:num_old]))
        picture.append(_printable(self._new_text), _FRESH)
        if self._canvas is None:
            return picture
        cells = zip(self._canvas.token_ids, self._canvas.fixed, self._fresh, strict=True)
        for token_id, is_fixed, is_fresh in cells:
            if not is_fixed and token_id == self._mask_token_id:
                picture.append(_SHADE, _MASKED)
                continue
            style = _FRESH if is_fresh else _FIXED if is_fixed else _TENTATIVE
            picture.append(_printable(self._text_of(token_id)).replace("\n", "\u21b5"), style)
        return picture

    def _text_of(self, token_id: int) -> str:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._piece(token_id)
        return self._pieces[token_id]

    def _find_mask(self, canvas: Any) -> None:
        """The mask is the open token that stands in the canvas as often as its text has shades."""
        cells = zip(canvas.token_ids, canvas.fixed, strict=True)
        open_ids = Counter(token_id for token_id, is_fixed in cells if not is_fixed)
        num_shades = canvas.text.count(_SHADE)
        for token_id, count in open_ids.items():
            if count == num_shades:
                self._mask_token_id = token_id


def usage_line(usage: Any) -> str:
    """What an answer cost, for people."""
    tokens, forwards = usage.output_tokens, usage.forward_passes
    return f"{tokens} tokens, {forwards} forwards, {tokens / max(1, forwards):.2f} tokens a forward"


def _fresh(before: Any, canvas: Any) -> list[bool]:
    """Which positions are fixed now and were not before.

    A block keeps its end while its leading positions are committed: ends are laid together.
    """
    was_fixed = []
    if before is not None and before.block == canvas.block:
        was_fixed = list(before.fixed)[-len(canvas.fixed) :]
    unseen = [False] * (len(canvas.fixed) - len(was_fixed))
    pairs = zip(canvas.fixed, unseen + was_fixed, strict=True)
    return [is_fixed and not was for is_fixed, was in pairs]


def _printable(text: str) -> str:
    """Text that cannot steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.expandtabs(4))
