"""Hermes 2 Pro, Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import re

from frontend.parsers.grammar import Markers, Steps, ignore
from frontend.parsers.json_calls import JsonParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = Markers(_OPEN, _CLOSE)
_STRAY = re.compile(r"[\s}]*")
"""What models put behind an object that is whole already."""


class HermesParser(JsonParser):
    """Text may stand around the calls. A closing tag that closes nothing is text."""

    def _read(self) -> Steps[None]:
        is_open = False
        while marker := (yield from self._content_until(_MARKERS)):
            if marker == _CLOSE:
                if not is_open:
                    self._say(_CLOSE)
                is_open = False
                continue
            self._hold(marker)
            is_open = yield from self._call_object()
            if is_open:
                yield from self._run(_STRAY, ignore)
            else:
                self._release()
