"""MiniMax M2: <invoke> calls in <minimax:tool_call>, values as plain text.

<minimax:tool_call>
<invoke name="NAME">
<parameter name="KEY">value</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from frontend.parsers.invoke_calls import InvokeParser


class MiniMaxM2Parser(InvokeParser):
    """What a value is, its schema says."""

    sections = ("minimax:tool_call",)
