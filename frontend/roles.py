"""Roles of messages under the names that a chat template knows. It does not know requests."""

from __future__ import annotations

from dataclasses import replace

from frontend.request import Chat

_NEWER, _OLDER = "developer", "system"


def as_known(chat: Chat, template: str) -> Chat:
    """The chat with developer messages as system messages, unless the template names developers.

    OpenAI's SDKs and agents send the newer role; most templates refuse it, or drop what it says.
    """
    if _NEWER in template or all(one["role"] != _NEWER for one in chat.messages):
        return chat
    messages = [{**one, "role": _OLDER} if one["role"] == _NEWER else one for one in chat.messages]
    return replace(chat, messages=messages)
