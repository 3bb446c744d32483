"""Anthropic bodies as requests of the frontend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.api.anthropic_schema import CountTokensBody, MessagesBody, Tool
from frontend.api.anthropic_turns import to_messages
from frontend.api.openai_request import to_decoding, to_seed, to_text
from frontend.api.openai_schema import FunctionBody, ToolBody
from frontend.api.openai_tools import with_tools
from frontend.api.structured import of_response_format
from frontend.api.tool_choice import ToolChoice
from frontend.request import Chat, Options, Sampling, TextRequest
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.structured import Constraint


def to_request(body: MessagesBody, variables: frozenset[str]) -> TextRequest:
    """The request behind POST /v1/messages; `variables` are those that the chat template reads."""
    options = Options(
        model=body.model or "",
        sampling=Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=to_seed(body.seed),
            max_tokens=body.max_tokens,
        ),
        decoding=to_decoding(body.decoding),
        constraint=_constraint(body),
        stop=tuple(body.stop_sequences or ()),
        user=(body.metadata and body.metadata.user_id) or "",
    )
    budget = body.thinking.budget_tokens if body.thinking else None
    if budget is not None and budget >= body.max_tokens:
        raise InvalidRequest(
            f"thinking.budget_tokens is {budget}; it must be less than max_tokens, which is "
            f"{body.max_tokens}",
            param="thinking.budget_tokens",
        )
    chat = to_conversation(body, variables)
    return TextRequest(prompts=(chat,), options=options, prompt_param="messages")


def to_conversation(body: CountTokensBody, variables: frozenset[str]) -> Chat:
    """System prompt, tools and turns for the template; a last turn of the assistant is continued.

    Raises Unsupported naming blocks and tools that are not served.
    """
    messages = to_messages(body.messages)
    continues = messages[-1]["role"] == "assistant"
    system = body.system or ""
    if isinstance(system, list):
        system = to_text(system, "system")
    if system:
        messages.insert(0, {"role": "system", "content": system})
    choice = body.tool_choice
    chat = Chat(
        messages=messages,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_kwargs=_thinking(body, variables) | _effort(body, variables),
    )
    parallel = not (choice and choice.disable_parallel_tool_use)
    return with_tools(chat, _tools(body.tools or ()), _choice(body), parallel=parallel)


def tells_thinking(body: CountTokensBody) -> bool:
    """Whether the client expects blocks of thinking."""
    return _thinks(body) and body.thinking is not None and body.thinking.display != "omitted"


def _thinks(body: CountTokensBody) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def _thinking(body: CountTokensBody, variables: frozenset[str]) -> dict[str, Any]:
    """What the template is told about thinking, if anything is asked and it can be told."""
    if body.thinking is None:
        return {}
    if (body.thinking.type == "enabled") != (body.thinking.budget_tokens is not None):
        raise InvalidRequest(
            "thinking.budget_tokens goes with type enabled, and with no other",
            param="thinking.budget_tokens",
        )
    named = {"enable_thinking": _thinks(body)}
    return named if "enable_thinking" in variables else {}


def _effort(body: CountTokensBody, variables: frozenset[str]) -> dict[str, Any]:
    """What the template is told about effort."""
    effort = body.output_config.effort if body.output_config else None
    if effort and "reasoning_effort" in variables:
        return {"reasoning_effort": effort}
    if effort not in (None, "high"):
        raise Unsupported(
            f"output_config.effort is {effort!r}, and the chat template of this model has no such "
            "setting; leave it out",
            param="output_config.effort",
        )
    return {}


def _constraint(body: CountTokensBody) -> Constraint | None:
    """What the answer's text must be, under the newer or the older name."""
    newer = body.output_config.format if body.output_config else None
    older = body.output_format
    if newer is not None and older is not None:
        raise InvalidRequest(
            "output_config.format and output_format both say what the answer must be; give one",
            param="output_format",
        )
    given = newer if older is None else older
    param = "output_config.format" if older is None else "output_format"
    return None if given is None else of_response_format(given, param)


def _tools(tools: Sequence[Tool]) -> list[ToolBody]:
    """The tools under OpenAI's names, which templates read."""
    found = []
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if tool.type not in (None, "custom"):
            raise Unsupported(f"{place}: tools of type {tool.type!r} are not served", param=place)
        if tool.input_schema is None:
            raise InvalidRequest(f"{place}.input_schema is missing", param=f"{place}.input_schema")
        function = FunctionBody(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        found.append(ToolBody(type="function", function=function))
    return found


def _choice(body: CountTokensBody) -> ToolChoice:
    """Raises InvalidRequest, in Anthropic's words, for a call that is forced and cannot be."""
    choice = body.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return ToolChoice("auto" if choice is None else choice.type)
    if not body.tools:
        raise InvalidRequest(
            f"tool_choice is of type {choice.type}, and there are no tools; send some, or leave it "
            "out",
            param="tool_choice",
        )
    if choice.type == "tool" and not choice.name:
        raise InvalidRequest(
            "tool_choice.name is missing; name one of tools, or set the type to any",
            param="tool_choice.name",
        )
    return ToolChoice("required", choice.name or "")
