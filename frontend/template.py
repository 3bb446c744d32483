"""Renders conversations with the model's chat template, the way transformers does.

It does not know tokens. The rendering function is transformers' own, so that there is one code
path for templates in the whole field; importing it does not import torch. A server renders in
processes of their own (template_pool), which alone load it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, cast

# A frontend has no torch on purpose; transformers would advise to install it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frontend.request import Chat
from frontend.tokenizer import TextTokenizer
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest, Unsupported
from tidemill.written import read_written

_LOG = logging.getLogger("tidemill.frontend")
_PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{{ '' if loop.last else '\n' }}{% endfor %}"
    "{{ '\nAssistant:' if add_generation_prompt else '' }}"
)
"""For models without a template: the plain form that base models continue best."""
RESERVED = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversations",
        "documents", "kwargs", "messages", "return_assistant_tokens_mask", "tools",
    }
)  # fmt: skip
"""Names that the rendering function has for itself."""


class ChatTemplate:
    """One template with the special tokens it may refer to.

    `variables` are the names that it reads, those that it sets itself included.
    """

    def __init__(self, source: str | None, special_tokens: dict[str, str]) -> None:
        """Raises FailedPrecondition when the template does not compile."""
        self.source = source or _PLAIN
        self._special_tokens = special_tokens
        try:
            parsed = _environment().parse(self.source)
        except jinja2.TemplateSyntaxError as failure:
            raise FailedPrecondition(
                f"the chat template does not compile (line {failure.lineno}): {failure.message}; "
                "correct it or choose another one with --chat-template",
                reason="TEMPLATE_BROKEN",
                param="chat_template",
            ) from failure
        except RecursionError as failure:
            raise FailedPrecondition(
                "the chat template does not compile: it is nested too deeply; choose another one "
                "with --chat-template",
                reason="TEMPLATE_BROKEN",
                param="chat_template",
            ) from failure
        # jinja2.meta would find them by compiling, which computes what is constant: 9 ** 9 ** 9.
        names = parsed.find_all(jinja2.nodes.Name)
        self.variables = frozenset(name.name for name in names if name.ctx == "load")

    def render(self, chat: Chat) -> str:
        """The prompt's text, rendered here, without limits. Raises InvalidRequest when the template
        refuses the messages."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self.check(chat)
        try:
            rendered = render_jinja_template(
                [chat.messages],
                chat_template=self.source,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tools=list(chat.tools) or None,
                **{**self._special_tokens, **chat.template_kwargs},
            )
        except Exception as failure:  # templates compute: any error of Python's can come out
            raise InvalidRequest(
                "the chat template cannot render these messages: "
                f"{type(failure).__name__}: {failure}",
                param="messages",
            ) from failure
        conversations, _ = cast("tuple[list[str], Any]", rendered)
        return conversations[0]

    def check(self, chat: Chat) -> None:
        """Raises InvalidRequest or Unsupported for what no template is to be asked for."""
        if chat.add_generation_prompt and chat.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other: a final "
                "message is either answered or continued; set one of them to false",
                param="continue_final_message",
            )
        if chat.continue_final_message:
            _check_last(chat.messages[-1])
        for name in chat.template_kwargs:
            if name in RESERVED:
                raise InvalidRequest(
                    f"{name!r} cannot be set through chat_template_kwargs",
                    param="chat_template_kwargs",
                )
        if "reasoning_effort" in chat.template_kwargs and "reasoning_effort" not in self.variables:
            raise Unsupported(
                "reasoning_effort: the chat template of this model has no such setting",
                param="reasoning_effort",
            )


def _check_last(message: dict[str, Any]) -> None:
    """Only what the model itself began can be continued; an empty text is a beginning too."""
    role = message.get("role")
    if role != "assistant":
        raise InvalidRequest(
            f"the last message is of the role {role!r}, and continue_final_message continues one "
            "of the role 'assistant'; add such a message, or leave continue_final_message out",
            param="continue_final_message",
        )
    if message.get("tool_calls"):
        raise InvalidRequest(
            "the last message calls tools, and continue_final_message continues a text; remove "
            "the calls, or leave continue_final_message out",
            param="continue_final_message",
        )


def load_template(tokenizer: TextTokenizer, file: str | None) -> ChatTemplate:
    """The template of `file` (flag --chat-template), else the tokenizer's, else a plain one."""
    if file is not None:
        try:
            source: str | None = read_written(Path(file))
        except (OSError, UnicodeDecodeError) as failure:
            raise FailedPrecondition(
                f"cannot read the chat template {file}: {failure}; correct --chat-template",
                reason="TEMPLATE_MISSING",
                param="chat_template",
            ) from failure
        return ChatTemplate(source, tokenizer.template_variables)
    if tokenizer.chat_template is None:
        _LOG.warning(
            "the tokenizer has no chat template: chats are rendered as 'Role: text' lines; "
            "choose a template with --chat-template"
        )
    return ChatTemplate(tokenizer.chat_template, tokenizer.template_variables)


def _environment() -> jinja2.Environment:
    """Accepts what transformers' environment accepts; used for parsing only."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    return environment


class _Generation(jinja2.ext.Extension):
    """The {% generation %} block that training code marks assistant text with."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> Any:
        """The block's body, as if the tags were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
