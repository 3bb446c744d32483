"""`tool_choice` as each API writes it: which tools an answer may call, and whether it must.

It does not know the tools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from frontend.api.wrong_fields import short
from tidemill.runtime.errors import InvalidRequest

MODES = ("none", "auto", "required")


class ToolChoice(NamedTuple):
    """`mode` is none, auto or required; `name` the tool that must be called, if it is a certain
    one; `allowed` the tools that the model is told of, None: all."""

    mode: str = "auto"
    name: str = ""
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceForm:
    """How an API writes a choice of tools of these `kinds`: beside the type, or, where `is_nested`,
    in an object that is called as the type is."""

    kinds: tuple[str, ...]
    is_nested: bool
    shown: str
    """How one tool is named, for clients that wrote it otherwise."""

    def read(self, given: str | dict[str, Any] | None) -> ToolChoice:
        """Raises InvalidRequest for what is no choice."""
        if given is None:
            return ToolChoice()
        if isinstance(given, str) and given in MODES:
            return ToolChoice(given)
        if isinstance(given, dict):
            kind = given.get("type", self.kinds[0])
            if kind == "allowed_tools":
                return self._allowed(self._inside(given, kind))
            if name := self._named(given):
                return ToolChoice("required", name)
            if isinstance(kind, str) and kind not in self.kinds:
                raise self._wrong(f"; tools of type {short(kind)} are not served")
        raise self._wrong()

    def _named(self, given: Any) -> str:
        """The tool that an object names; empty: it is not of this form."""
        kind = given.get("type", self.kinds[0]) if isinstance(given, dict) else None
        inside = self._inside(given, kind) if kind in self.kinds else {}
        name = inside.get("name")
        return name if isinstance(name, str) else ""

    def _inside(self, given: dict[str, Any], kind: str) -> dict[str, Any]:
        inside = given.get(kind) if self.is_nested else given
        return inside if isinstance(inside, dict) else {}

    def _allowed(self, given: dict[str, Any]) -> ToolChoice:
        listed, mode = given.get("tools"), given.get("mode")
        names = [self._named(one) for one in listed] if isinstance(listed, list) else []
        if mode not in ("auto", "required") or not names or "" in names:
            raise InvalidRequest(
                "tool_choice: allowed_tools needs a mode (auto or required) and tools, each as "
                f"{self.shown}",
                param="tool_choice",
            )
        return ToolChoice(mode, allowed=frozenset(names))

    def _wrong(self, more: str = "") -> InvalidRequest:
        return InvalidRequest(
            f"tool_choice must be {', '.join(MODES)}, {self.shown}, or of type allowed_tools{more}",
            param="tool_choice",
        )
