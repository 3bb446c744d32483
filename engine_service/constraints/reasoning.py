"""The grammar of reasoning that stands in front of an answer's, for llguidance.

It does not know how grammars compile.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from engine_service.core.params import ReasoningSpec

if TYPE_CHECKING:  # an engine may run without it
    from llguidance import LLTokenizer


def behind(reasoning: ReasoningSpec, grammar: str, tokenizer: LLTokenizer) -> str:
    """The grammar with the reasoning in front of it."""
    lark = reasoning.lark or _up_to_tag(reasoning, tokenizer)
    is_json = grammar.startswith("{")
    answer = json.loads(grammar)["grammars"] if is_json else [{"lark_grammar": grammar}]
    answer[0]["name"] = "answer"
    return json.dumps({"grammars": [{"lark_grammar": lark}, *answer]})


def is_special(text: str, tokenizer: LLTokenizer) -> bool:
    """Whether a text is one special token of the vocabulary."""
    ids: list[int] = tokenizer.tokenize_str(text, parse_special=True)
    return len(ids) == 1 and tokenizer.is_special_token(ids[0])


def _up_to_tag(reasoning: ReasoningSpec, tokenizer: LLTokenizer) -> str:
    """Lark: free text up to a tag, and white space."""
    is_open = not reasoning.start
    head = "" if is_open else _marker(reasoning.start, tokenizer)
    lazy = "" if is_special(reasoning.end, tokenizer) else "[lazy]"
    # Ordinary text ends where the marker comes first, which is what a lazy rule finds.
    return f"""%llguidance {{}}
start: {"think SPACE" if is_open else "(think SPACE)?"} @answer
think: {head} rest
rest{lazy}: TEXT {_marker(reasoning.end, tokenizer)}
TEXT: /(.|\\n)*/
SPACE: /[ \\t\\r\\n]{{0,8}}/
"""


def _marker(text: str, tokenizer: LLTokenizer) -> str:
    """A text in Lark, or the special token that it is."""
    if is_special(text, tokenizer):
        return f"<[{tokenizer.tokenize_str(text, parse_special=True)[0]}]>"
    return json.dumps(text)
