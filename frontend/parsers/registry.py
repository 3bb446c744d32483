"""Which parser reads which model's output: by name, or by what the chat template shows.

The names are vLLM's; SGLang's stand beside them where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from frontend.parsers.base import Content, Event, OutputParser, Span, ToolSpec
from frontend.parsers.grammar import GrammarParser
from frontend.parsers.reasoning.granite import GraniteParser
from frontend.parsers.reasoning.think import BracketThinkParser, ThinkTagsParser
from frontend.parsers.tools.deepseek import DeepSeekParser
from frontend.parsers.tools.deepseek_v32 import DeepSeekV32Parser
from frontend.parsers.tools.glm import GlmParser
from frontend.parsers.tools.harmony import HarmonyParser
from frontend.parsers.tools.hermes import HermesParser
from frontend.parsers.tools.kimi_k2 import KimiK2Parser
from frontend.parsers.tools.llama3_json import Llama3JsonParser
from frontend.parsers.tools.minimax_m2 import MiniMaxM2Parser
from frontend.parsers.tools.mistral import MistralParser
from frontend.parsers.tools.pythonic import PythonicParser
from frontend.parsers.tools.qwen3_coder import Qwen3CoderParser
from tidemill.runtime.errors import FailedPrecondition
from tidemill.structured import Reasoning

AUTO, NONE = "auto", "none"

TOOL_PARSERS: Mapping[str, type[GrammarParser]] = MappingProxyType(
    {
        "hermes": HermesParser,
        "qwen": HermesParser,
        "qwen25": HermesParser,
        "qwen3_coder": Qwen3CoderParser,
        "qwen3_xml": Qwen3CoderParser,
        "llama3_json": Llama3JsonParser,
        "llama3": Llama3JsonParser,
        "mistral": MistralParser,
        "deepseek_v3": DeepSeekParser,
        "deepseekv3": DeepSeekParser,
        "deepseek_v31": DeepSeekParser,
        "deepseekv31": DeepSeekParser,
        "deepseek_v32": DeepSeekV32Parser,
        "deepseekv32": DeepSeekV32Parser,
        "glm45": GlmParser,
        "glm47": GlmParser,
        "kimi_k2": KimiK2Parser,
        "minimax_m2": MiniMaxM2Parser,
        "minimax-m2": MiniMaxM2Parser,
        "openai": HarmonyParser,
        "gpt-oss": HarmonyParser,
        "pythonic": PythonicParser,
        "llama4_pythonic": PythonicParser,
    }
)


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """`begins_inside`: what holds where the prompt does not show whether reasoning is open."""

    parser: type[GrammarParser]
    begins_inside: bool = False

    def is_inside(self, prompt: str, continued: str = "") -> bool:
        """Whether an output behind `prompt` begins inside of the reasoning. `continued` is the
        text of the answer that it goes on with, if it does."""
        shown = None
        if issubclass(self.parser, ThinkTagsParser):
            shown = self.parser.begins_inside(prompt)
            if shown is None and continued:
                shown = self.parser.leaves_open(continued)
        return self.begins_inside if shown is None else shown


_THINK = ReasoningStyle(ThinkTagsParser)
_OPEN_THINK = ReasoningStyle(ThinkTagsParser, begins_inside=True)
_HARMONY = ReasoningStyle(HarmonyParser)
REASONING_PARSERS: Mapping[str, ReasoningStyle] = MappingProxyType(
    {
        "deepseek_r1": _OPEN_THINK,
        "deepseek-r1": _OPEN_THINK,
        "deepseek_v3": _THINK,
        "qwen3": _THINK,
        "glm45": _THINK,
        "kimi_k2": _THINK,
        "minimax_m2": _OPEN_THINK,
        "nemotron_v3": _OPEN_THINK,
        "step3": _OPEN_THINK,
        "mistral": ReasoningStyle(BracketThinkParser),
        "granite": ReasoningStyle(GraniteParser),
        "openai_gptoss": _HARMONY,
        "gpt-oss": _HARMONY,
    }
)

_TOOL_SIGNS = (
    ("<|channel|>", "openai"),
    ("｜DSML｜", "deepseek_v32"),  # noqa: RUF001
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),  # noqa: RUF001
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
)
"""What a template says of calls, the first sign counts."""
_REASONING_SIGNS = (
    ("<|channel|>", "openai_gptoss"),
    ("[THINK]", "mistral"),
    ("</think>", "qwen3"),
    ("Here is my thought process:", "granite"),
)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model's output is read. Both None: it is content as it stands."""

    tools: type[GrammarParser] | None = None
    reasoning: ReasoningStyle | None = None

    @property
    def reads_channels(self) -> bool:
        """Reasoning, calls and answers are messages of their own (harmony)."""
        style = self.reasoning
        return style is not None and style.parser is HarmonyParser is self.tools

    def needs_special_tokens(self, *, has_tools: bool) -> bool:
        """Whether markers that are looked for are special tokens."""
        readers = [self.tools] if self.tools and has_tools else []
        readers += [self.reasoning.parser] if self.reasoning else []
        return any(reader.needs_special_tokens for reader in readers)

    def parser(
        self, tools: Sequence[ToolSpec], prompt: str, continued: str = ""
    ) -> OutputParser | None:
        """A parser for one output behind `prompt` (its end will do), which may go on with the text
        `continued`; None where it would only hand the text on. Without `tools` no calls are looked
        for."""
        reads_calls = self.tools if tools else None
        style = self.reasoning
        if style is None or style.parser is reads_calls:
            return None if reads_calls is None else reads_calls(tools)
        first: GrammarParser
        if issubclass(style.parser, ThinkTagsParser):
            first = style.parser(is_inside=style.is_inside(prompt, continued))
        else:
            first = style.parser(tools)
        return first if reads_calls is None else InTurn(first, reads_calls(tools))

    def reasoning_behind(self, prompt: str, continued: str = "") -> Reasoning | None:
        """What may stand between `prompt` (its end will do) and an answer that follows a grammar;
        None where nothing may. `continued` as above."""
        style = self.reasoning
        if style is None:
            return None
        return style.parser.in_front(prompt, begins_inside=style.is_inside(prompt, continued))


class InTurn:
    """Calls are looked for in what the reasoning's parser leaves as content."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        """`first` reads the output, `second` what it says is content."""
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Event]:
        """See OutputParser."""
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[Event]:
        """See OutputParser."""
        return [*self._pass_on(self._first.finish()), *self._second.finish()]

    @property
    def reasoned(self) -> Sequence[Span]:
        """See OutputParser."""
        return self._first.reasoned

    def _pass_on(self, events: list[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            passed += self._second.feed(event.text) if isinstance(event, Content) else [event]
        return passed


def output_format(tools: str, reasoning: str, template: str | None) -> OutputFormat:
    """The format for two names of parsers; `auto` is what the chat template shows, `none` none.

    Raises FailedPrecondition for a name that nobody knows.
    """
    tools = _named("tool-call-parser", tools, template, _TOOL_SIGNS, TOOL_PARSERS)
    reasoning = _named("reasoning-parser", reasoning, template, _REASONING_SIGNS, REASONING_PARSERS)
    return OutputFormat(TOOL_PARSERS.get(tools), REASONING_PARSERS.get(reasoning))


def _named(
    flag: str,
    name: str,
    template: str | None,
    signs: Sequence[tuple[str, str]],
    known: Mapping[str, object],
) -> str:
    if name == AUTO:
        return next((found for sign, found in signs if sign in (template or "")), NONE)
    if name != NONE and name not in known:
        raise FailedPrecondition(
            f"--{flag} is {name!r}; it must be {AUTO}, {NONE} or one of {', '.join(sorted(known))}",
            reason="PARSER_UNKNOWN",
            param=flag.replace("-", "_"),
        )
    return name
