"""What verbs print to a person or into a pipe, line by line, as it stands.

It does not know what a line says.
"""

from __future__ import annotations

from rich.console import Console


class PlainConsole(Console):
    """stderr, without colours, emoji or markup. Who reads no more loses lines and nothing else: by
    itself this library ends the program then."""

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Nobody reads: nothing more is shown."""
        self.quiet = True

    def show(self, text: str) -> None:
        """One line, however long."""
        self.print(text, markup=False, soft_wrap=True)
