"""DeepSeek V3.2: DSML, <invoke> calls whose values say themselves whether they are strings.

<｜DSML｜function_calls>
<｜DSML｜invoke name="NAME">
<｜DSML｜parameter name="KEY" string="true">text</｜DSML｜parameter>
<｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""  # noqa: RUF002 (the format's own characters)

from __future__ import annotations

from collections.abc import Mapping

from frontend.parsers.invoke_calls import InvokeParser
from frontend.parsers.tagged_values import STRING

_ANY = frozenset({"any"})


class DeepSeekV32Parser(InvokeParser):
    """Where a value does not say what it is, its schema does."""

    needs_special_tokens = True
    mark = "｜DSML｜"  # noqa: RUF001
    sections = (f"{mark}function_calls", f"{mark}tool_calls")

    def _value_types(self, tool: str, key: str, attributes: Mapping[str, str]) -> frozenset[str]:
        """See InvokeParser."""
        told = {"true": STRING, "false": _ANY}.get(attributes.get("string", ""))
        return self._types(tool, key) if told is None else told
