"""Which trigger of a structural tag begins a text. It does not know grammars."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def trigger_finder(triggers: Sequence[str]) -> Callable[[str], str | None]:
    """What finds the first trigger that begins a text.

    By their lengths: a megabyte has room for 100,000 triggers and 10,000 texts, and to try each
    with each takes minutes.
    """
    places = {trigger: place for place, trigger in reversed([*enumerate(triggers)]) if trigger}
    lengths = sorted({len(trigger) for trigger in places})

    def find(begin: str) -> str | None:
        heads = (begin[:length] for length in lengths if length <= len(begin))
        return min((head for head in heads if head in places), key=places.__getitem__, default=None)

    return find
