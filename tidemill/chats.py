"""Conversations that callers of `tidemill.LLM` give it, read by the frontend's own rules: what a
server would refuse is refused in the same words. It does not know the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frontend.api.openai_request import as_body, to_chat
from frontend.api.openai_schema import ChatBody
from frontend.reading import check_place
from frontend.request import Chat
from frontend.roles import as_known
from frontend.template import ChatTemplate, load_template
from frontend.tokenizer import TextTokenizer
from tidemill.nesting import MAX_DEPTH, is_too_deep
from tidemill.prompts import TextPrompt
from tidemill.runtime.errors import InvalidRequest


def as_prompts(
    messages: Any,
    tokenizer: TextTokenizer,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[TextPrompt]:
    """Prompts of one conversation or of several, rendered by the model's template.

    Raises InvalidRequest or Unsupported, naming the field as a server does.
    """
    told = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template_kwargs": template_kwargs,
        "tools": _plain(tools),
    }
    template = load_template(tokenizer, None)
    chats = [_read_chat(one, template, told) for one in _as_chats(messages)]
    texts = [template.render(chat) for chat in chats]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    pairs = zip(texts, ids, strict=True)
    return [TextPrompt(*pair, goes_on=bool(continue_final_message)) for pair in pairs]


def _as_chats(messages: Any) -> list[Any]:
    """Several conversations, whichever way one or many were given."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        return [messages]
    is_one = bool(messages) and isinstance(messages[0], Mapping)
    return [messages] if is_one else list(messages)


def _read_chat(messages: Any, template: ChatTemplate, told: Mapping[str, Any]) -> Chat:
    """A conversation as a body says it."""
    given: dict[str, Any] = {"messages": _plain(messages), **told}
    if is_too_deep(given):
        raise InvalidRequest(
            f"messages have more than {MAX_DEPTH} objects and lists inside of each other; nest "
            "them less deeply",
            param="messages",
        )
    (chat,) = to_chat(as_body(given, ChatBody)).prompts
    assert isinstance(chat, Chat), "a body of messages"
    check_place(chat, template.variables)
    return as_known(chat, template.source)


def _plain(given: Any) -> Any:
    """What a body's JSON would hold: mappings of other kinds as dicts. What is no list is left as
    it is, to be refused as a server does."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return given
    return [dict(one) if isinstance(one, Mapping) else one for one in given]
