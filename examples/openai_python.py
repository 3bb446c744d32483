"""OpenAI's Python SDK with the base URL changed: chat, stream, a tool, JSON by a schema.

usage: python examples/openai_python.py [http://HOST:PORT/v1]
"""

import json
import os
import sys
from typing import Any

from openai import BadRequestError, OpenAI
from pydantic import BaseModel

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = "demo"


class Person(BaseModel):
    """What the structured answer has to be."""

    name: str
    age: int
    city: str


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "save_person",
        "description": "Stores a person.",
        "parameters": Person.model_json_schema(),
    },
}


def user(text: str) -> Any:
    """A conversation of one turn."""
    return [{"role": "user", "content": text}]


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else URL
    client = OpenAI(base_url=url, api_key="none")

    answer = client.chat.completions.create(model=MODEL, messages=user("reverse: harbour"))
    print("chat:  ", answer.choices[0].message.content)

    print("stream: ", end="")
    with client.chat.completions.create(
        model=MODEL,
        messages=user("count: 37 n=5"),
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage:
                print(f"  ({chunk.usage.completion_tokens} tokens)")

    # A forced call: its arguments follow the tool's schema, whatever the model would say.
    called = client.chat.completions.create(
        model=MODEL,
        messages=user("json: tom 31 rome"),
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "save_person"}},
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    print("tool:  ", call.function.name, json.loads(call.function.arguments))

    # The SDK sends the schema of `Person`, and reads the answer back as one.
    parsed = client.chat.completions.parse(
        model=MODEL, messages=user("json: ada 36 london"), response_format=Person
    )
    print("schema:", repr(parsed.choices[0].message.parsed))

    try:
        client.chat.completions.create(model=MODEL, messages=user("hi"), temperature=-1)
    except BadRequestError as error:
        print("error: ", error.status_code, error.param, "-", error.body["message"])  # type: ignore[index]


if __name__ == "__main__":
    main()
