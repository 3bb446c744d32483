"""Short chats as whole requests, the same for both faces of a frontend."""

from __future__ import annotations

import orjson

from tidemill.v1 import engine_pb2, text_pb2


def http_chat(number: int, max_tokens: int, *, is_stream: bool) -> bytes:
    """An HTTP/1.1 request, head and body."""
    body = orjson.dumps(
        {
            "model": "clock",
            "messages": [{"role": "user", "content": _ask(number)}],
            "max_tokens": max_tokens,
            "temperature": 0.7,
            "stream": is_stream,
        }
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}"
    return f"{head}\r\ncontent-type: application/json\r\n\r\n".encode() + body


def grpc_path(*, is_stream: bool) -> str:
    """The method that `grpc_chat` is for."""
    return f"/tidemill.v1.TextService/{'ChatStream' if is_stream else 'Chat'}"


def grpc_chat(number: int, max_tokens: int, *, is_stream: bool) -> bytes:
    """The message of TextService.Chat, or of ChatStream."""
    kind = text_pb2.ChatStreamRequest if is_stream else text_pb2.ChatRequest
    sampling = engine_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.7)
    parts = [text_pb2.ContentPart(text=_ask(number))]
    request = kind(
        messages=[text_pb2.ChatMessage(role="user", parts=parts)],
        options=text_pb2.TextOptions(model="clock", sampling=sampling),
    )
    return request.SerializeToString()


def _ask(number: int) -> str:
    return f"add: {100 + number % 900}+{999 - number % 900}"
