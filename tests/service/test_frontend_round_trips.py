"""What a model said goes back in the next request as it was told, whatever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.service.frontends import stack

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{% for name, value in call.function.arguments | items %}[{{ name }}={{ value }}]{% endfor %}"
    "{% endfor %}{% endfor %}{% if tools %}!{% endif %}"
)
PARAMETERS = {"type": "object"}
ECHOED = {"max_tokens": 200, "model": "fake"}


def said(arguments: str) -> str:
    """The fake engine echoes it."""
    return f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call><|eos|>'


async def chat(http: Any, text: str) -> Any:
    messages: list[Any] = [{"role": "user", "content": text}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    body = {**ECHOED, "tools": tools, "messages": messages}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "no"}
    body["messages"] = [*messages, message, result]
    return await http.post("/v1/chat/completions", json=body)


async def responses(http: Any, text: str, *, kept: bool = False) -> Any:
    items: list[Any] = [{"role": "user", "content": text}]
    tools = [{"type": "function", "name": "f", "parameters": PARAMETERS}]
    body = {"model": "fake", "max_output_tokens": 200, "tools": tools, "input": items}
    answer = (await http.post("/v1/responses", json=body)).json()
    (call,) = answer["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "no"}
    body["input"] = [result] if kept else [*items, call, result]
    body |= {"previous_response_id": answer["id"]} if kept else {}
    return await http.post("/v1/responses", json=body)


async def kept_responses(http: Any, text: str) -> Any:
    return await responses(http, text, kept=True)


async def messages(http: Any, text: str) -> Any:
    turns: list[Any] = [{"role": "user", "content": text}]
    body = {**ECHOED, "tools": [{"name": "f", "input_schema": PARAMETERS}], "messages": turns}
    answer = (await http.post("/v1/messages", json=body)).json()
    (call,) = answer["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "no"}
    turns += [
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    return await http.post("/v1/messages", json=body)


@pytest.mark.parametrize("ask", [chat, responses, kept_responses, messages])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("{city: 1}", "[INVALID_JSON={city: 1}]"),
        ("[1]", "[INVALID_JSON=[1]]"),
        ('{"city": 1}', "[city=1]"),
    ],
)
async def test_a_call_whose_arguments_are_no_object_goes_back(
    tmp_path: Path, ask: Any, arguments: str, told: str
) -> None:
    """It was given out and, in the next request, refused: the conversation could not go on."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    engine = {"tokens_per_step": 20, "max_model_len": 2048}
    async with stack(tmp_path, engine=engine, chat_template=str(template), **flags) as served:
        async with served.http() as http:
            answer = await ask(http, said(arguments))
        assert answer.status_code == 200, answer.text
        prompt = list(memoryview(served.engine.submits[-1].prompt_token_ids).cast("I"))
    assert told in served.tokenizer.decode(prompt, skip_special_tokens=False)
