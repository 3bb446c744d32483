"""Mistral: [TOOL_CALLS] with a list of objects, or since tokenizer v11 with a name each.

Old: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
v11: [TOOL_CALLS]name{...}, also [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}
v13: [TOOL_CALLS]name[ARGS]{...}, the marker again in front of each call.
"""

from __future__ import annotations

import re
import secrets
import string

from frontend.parsers.grammar import Markers, Steps
from frontend.parsers.json_calls import JsonParser

_MARKER, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MARKERS = Markers(_MARKER)
_NAME = re.compile(r"[\w.-]*")


def new_mistral_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other id in the next turn."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class MistralParser(JsonParser):
    """Tells the forms apart by what follows the marker."""

    needs_special_tokens = True
    new_id = staticmethod(new_mistral_id)

    def _read(self) -> Steps[None]:
        while marker := (yield from self._content_until(_MARKERS)):
            self._hold(marker)
            first = yield from self._next()
            is_call = yield from (self._call_list() if first in ("[", "{") else self._named_call())
            if not is_call:
                self._release()

    def _named_call(self) -> Steps[bool]:
        """A name and its arguments; False, with nothing told, where that is not what follows."""
        name = yield from self._word(_NAME)
        call_id = None
        if (yield from self._accept(_ID)):
            call_id = yield from self._word(_NAME)
        yield from self._accept(_ARGUMENTS)
        if not name or (yield from self._next()) != "{":
            return False
        self._begin(name, call_id)
        yield from self._value(self._out.arguments)
        return True
