"""Tools and reasoning in chats, with the official SDK and over gRPC. The engine is a fake that
echoes its prompt, and the template a message: so a message is what the model says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from tests.service.frontends import Stack, byte_tokenizer, stack, write_tokenizer
from tidemill.commands import chat
from tidemill.nesting import MAX_DEPTH
from tidemill.runtime.errors import FailedPrecondition
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc

TEMPLATE = (
    "{# <tool_call> <think></think> #}{{ messages[-1].content }}<|eos|>"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ARGUMENTS = '{"city": "Zürich }"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\nWhere? <b>\n</think>\n\nI look.\n{CALL}\n{CALL}"


@asynccontextmanager
async def serving(folder: Path, template: str = TEMPLATE, **fields: Any) -> AsyncIterator[Stack]:
    file = folder / "template.jinja"
    file.write_text(template)
    engine = {"max_model_len": 4096, **fields.pop("engine", {})}
    async with stack(folder, engine=engine, chat_template=str(file), **fields) as served:
        yield served


def byte_length(text: str) -> int:
    """Tokens of a text."""
    return len(byte_tokenizer().encode(text, add_special_tokens=False).ids)


def sdk(served: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)


@asynccontextmanager
async def texts(served: Stack) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        yield rpc.TextServiceStub(channel)


def asking(text: str = ANSWER, **fields: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": text}],
        "tools": [WEATHER],
        **fields,
    }


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    """A stream put together the way clients do, and its finish."""
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "calls": []}
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        (choice,) = chunk.choices
        delta = choice.delta.model_dump()
        for name in ("content", "reasoning_content", "reasoning"):
            whole[name] += delta.get(name) or ""
        for call in delta["tool_calls"] or []:
            if call["id"]:
                assert call["index"] == len(whole["calls"])
                whole["calls"].append(
                    {"id": call["id"], "name": call["function"]["name"], "arguments": ""}
                )
            whole["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        if choice.finish_reason:
            assert choice.delta.model_dump(exclude_none=True) == {}
            whole["finish"] = choice.finish_reason
    return whole


async def test_a_whole_answer_has_its_parts(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, sdk(served) as client:
        answer = await client.chat.completions.create(**asking())
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "Where? <b>"
    assert choice.message.model_extra["reasoning"] == "Where? <b>"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == byte_length("\nWhere? <b>\n")
    calls = choice.message.tool_calls or []
    assert [c.type for c in calls] == ["function"] * 2
    assert [c.function.name for c in calls] == ["get_weather"] * 2
    assert [c.function.arguments for c in calls] == [ARGUMENTS] * 2
    assert len({c.id for c in calls}) == 2


@pytest.mark.parametrize("per_step", [1, 3, 7, 500])
async def test_a_stream_says_the_same_for_deltas_of_any_size(tmp_path: Path, per_step: int) -> None:
    engine = {"tokens_per_step": per_step}
    async with serving(tmp_path, engine=engine) as served, sdk(served) as client:
        whole = await streamed(client, **asking())
    calls = whole.pop("calls")
    assert whole == {
        "content": "I look.",
        "reasoning_content": "Where? <b>",
        "reasoning": "Where? <b>",
        "finish": "tool_calls",
    }
    assert [(c["name"], c["arguments"]) for c in calls] == [("get_weather", ARGUMENTS)] * 2


@pytest.mark.parametrize("per_step", [1, 500])
async def test_a_call_that_a_stop_string_cuts_off_is_not_to_be_made(
    tmp_path: Path, per_step: int
) -> None:
    engine = {"tokens_per_step": per_step}
    async with serving(tmp_path, engine=engine) as served, sdk(served) as client:
        cut = await streamed(client, **asking(stop="rich"))
        whole = await streamed(client, **asking(stop="</tool_call>"))
    assert cut["finish"] == "stop"
    assert [one["arguments"] for one in cut["calls"]] == ['{"city": "Zü']
    assert whole["finish"] == "tool_calls"
    assert [one["arguments"] for one in whole["calls"]] == [ARGUMENTS]


async def test_calls_alone_leave_the_content_null(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, sdk(served) as client:
        answer = await client.chat.completions.create(**asking(CALL))
        assert answer.choices[0].message.content is None
        assert "reasoning" not in (answer.choices[0].message.model_extra or {})
        assert (await streamed(client, **asking(CALL)))["content"] == ""


async def test_only_one_call_where_several_are_not_wanted(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, sdk(served) as client:
        fields = asking(parallel_tool_calls=False)
        answer = await client.chat.completions.create(**fields)
        assert len(answer.choices[0].message.tool_calls or []) == 1
        assert len((await streamed(client, **fields))["calls"]) == 1


async def test_reasoning_can_be_left_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, sdk(served) as client:
        fields = asking(extra_body={"include_reasoning": False})
        answer = await client.chat.completions.create(**fields)
        assert "reasoning" not in (answer.choices[0].message.model_extra or {})
        assert answer.choices[0].message.content == "I look."
        whole = await streamed(client, **fields)
        assert (whole["reasoning"], whole["content"]) == ("", "I look.")


async def test_the_template_is_told_of_tools_only_if_they_may_be_called(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, sdk(served) as client:
        for fields, is_told in (
            (asking(), True),
            (asking(tool_choice="auto"), True),
            (asking(tool_choice="none"), False),
            (asking(tools=[]), False),
        ):
            answer = await client.chat.completions.create(**fields)
            prompt = served.tokenizer.decode(_prompt_of(served))
            assert (prompt == ANSWER + json.dumps([WEATHER])) is is_told
            assert (answer.choices[0].finish_reason == "tool_calls") is is_told
            assert (CALL in (answer.choices[0].message.content or "")) is not is_told


def _prompt_of(served: Stack) -> list[int]:
    packed = served.engine.submits[-1].prompt_token_ids
    return [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]


async def test_a_call_that_is_cut_off_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, sdk(served) as client:
        answer = await client.chat.completions.create(**asking(CALL, max_tokens=60))
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "length"
    assert ARGUMENTS.startswith(call.function.arguments)
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


async def test_a_forced_call_that_is_cut_off_is_no_text(tmp_path: Path) -> None:
    """Wherever that is: what the model wrote is the beginning of calls, and nothing else."""
    two = json.dumps([{"name": "get_weather", "parameters": {"city": "Zug"}}] * 2)
    named = {"type": "function", "function": {"name": "get_weather"}}
    told = set()
    async with serving(tmp_path) as served, sdk(served) as client:
        for choice, text in (("required", two), (named, '{"city": "Zug"}')):
            for size in range(1, byte_length(text)):
                fields = asking(text, max_tokens=size, tool_choice=choice)
                served.engine.tokens_per_step = size  # it is cut off where it ends, however it came
                answer = await client.chat.completions.create(**fields)
                (one,) = answer.choices
                assert (one.message.content, one.finish_reason) == (None, "length"), size
                calls = [
                    (c.function.name, c.function.arguments) for c in one.message.tool_calls or []
                ]
                for name, arguments in calls:
                    assert name == "get_weather"
                    assert '{"city": "Zug"}'.startswith(arguments)
                told.add((isinstance(choice, str), len(calls)))
                if size % 7 == 0:
                    served.engine.tokens_per_step = 1
                    seen = await streamed(client, **fields)
                    assert (seen["content"], seen["finish"]) == ("", "length")
                    again = [(c["name"], c["arguments"]) for c in seen["calls"]]
                    assert again == calls
    assert told == {(True, 0), (True, 1), (True, 2), (False, 1)}


async def test_an_answer_that_says_nothing_goes_back_as_it_came(tmp_path: Path) -> None:
    """Only the assistant may say nothing."""
    async with serving(tmp_path) as served, sdk(served) as client:
        fields = asking('[{"name": "get', max_tokens=5, tool_choice="required")
        (cut,) = (await client.chat.completions.create(**fields)).choices
        assert (cut.message.content, cut.message.tool_calls) == (None, None)
        turn = cut.message.model_dump(exclude_unset=True)
        fields = asking()
        fields["messages"] += [turn, {"role": "user", "content": "Go on."}]
        (again,) = (await client.chat.completions.create(**fields)).choices
        assert again.message.content.startswith("Go on.")
        fields["messages"][-1]["content"] = None
        with pytest.raises(openai.BadRequestError, match=r"messages\[\d\].content"):
            await client.chat.completions.create(**fields)


async def test_markers_that_are_special_tokens_are_read_and_not_shown(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    write_tokenizer(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = "Yes.[TOOL_CALLS]get_weather" + ARGUMENTS
    fields = {"tokenizer": str(folder), "tool_call_parser": "mistral"}
    async with serving(tmp_path, **fields) as served, sdk(served) as client:
        answer = await client.chat.completions.create(**asking(text))
        assert answer.choices[0].message.content == "Yes."
        (call,) = answer.choices[0].message.tool_calls or []
        assert (call.function.arguments, len(call.id)) == (ARGUMENTS, 9)
        answer = await client.chat.completions.create(**asking(text, tools=[]))
        assert answer.choices[0].message.content == text.replace("[TOOL_CALLS]", "")


async def test_tools_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    plain = "{{ messages[-1].content }}<|eos|>"
    for template, flags, words in (
        (plain, {}, "no place for tools"),
        (plain + "{{ tools }}", {}, "--tool-call-parser"),
        (TEMPLATE, {"tool_call_parser": "none"}, "--tool-call-parser"),
    ):
        async with serving(tmp_path, template, **flags) as served, sdk(served) as client:
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                await client.chat.completions.create(**asking())
            assert refused.value.param == "tools"
            assert served.engine.submits == []
            answer = await client.chat.completions.create(**asking(tool_choice="none"))
            assert CALL in (answer.choices[0].message.content or "")


async def test_an_unknown_parser_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="--reasoning-parser is 'qwen9'"):
        async with serving(tmp_path, reasoning_parser="qwen9"):
            pass


async def test_grpc_says_the_same(tmp_path: Path) -> None:
    function = WEATHER["function"]
    tool = {
        "name": function["name"],
        "description": function["description"],
        "parameters_json_schema": json.dumps(function["parameters"]),
    }
    fields = {
        "messages": [{"role": "user", "parts": [{"text": ANSWER}]}],
        "chat": {"tools": [tool]},
    }
    engine = {"tokens_per_step": 3}
    async with serving(tmp_path, engine=engine) as served, texts(served) as stub:
        call = stub.Chat(pb.ChatRequest(**fields))
        answer = await call
        trailers, (choice,) = dict(await call.trailing_metadata()), answer.choices
        assert served.tokenizer.decode(_prompt_of(served)) == ANSWER + json.dumps([WEATHER])
        stream = stub.ChatStream(pb.ChatStreamRequest(**fields))
        pieces = [m async for m in stream]
        streamed_trailers = dict(await stream.trailing_metadata())
    message, num_reasoning = choice.message, byte_length("\nWhere? <b>\n")
    assert answer.usage.reasoning_tokens == pieces[-1].usage.reasoning_tokens == num_reasoning
    for one in (trailers, streamed_trailers):
        assert one["x-usage-reasoning-tokens"] == str(num_reasoning)
    assert choice.finish_reason == "tool_calls"
    assert [part.text for part in message.parts] == ["I look."]
    assert message.reasoning == "Where? <b>"
    assert [(c.index, c.name, c.arguments_json) for c in message.tool_calls] == [
        (0, "get_weather", ARGUMENTS),
        (1, "get_weather", ARGUMENTS),
    ]
    messages = [piece.choice.message for piece in pieces if piece.HasField("choice")]
    assert "".join(p.text for m in messages for p in m.parts) == "I look."
    assert "".join(m.reasoning for m in messages) == "Where? <b>"
    calls = [c for m in messages for c in m.tool_calls]
    assert "".join(c.arguments_json for c in calls if c.index == 1) == ARGUMENTS
    assert [c.name for c in calls if c.id] == ["get_weather"] * 2


async def test_grpc_refuses_broken_tools_by_name(tmp_path: Path) -> None:
    message = {"role": "user", "parts": [{"text": "a"}]}
    async with serving(tmp_path) as served, texts(served) as stub:
        for tool, words in (
            ({"name": "f", "parameters_json_schema": "{"}, "parameters_json_schema"),
            ({"name": "f", "parameters_json_schema": "[]"}, "parameters"),
            ({"name": ""}, "name"),
            (
                {"name": "f", "parameters_json_schema": '{"a":' * 200 + "1" + "}" * 200},
                f"tools[0].parameters_json_schema has more than {MAX_DEPTH}",
            ),
        ):
            request = pb.ChatRequest(messages=[message], chat={"tools": [tool]})
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.Chat(request)
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in (failed.value.details() or "")


@pytest.mark.parametrize("per_step", [3, 500])
async def test_the_command_line_keeps_reasoning_out_of_the_answer(
    tmp_path: Path, per_step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "<think>Where? <b></think>There."
    async with serving(tmp_path, engine={"tokens_per_step": per_step}) as served:
        argv = ["--server", served.grpc_address, text]
        assert await asyncio.to_thread(chat.run, argv) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("There.\n", "Where? <b>\n\n")


async def test_tokenize_tells_what_the_tools_add(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.http() as http:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        plain = (await http.post("/tokenize", json=body)).json()["tokens"]
        told = (await http.post("/tokenize", json={**body, "tools": [WEATHER]})).json()["tokens"]
        added = byte_tokenizer().encode(json.dumps([WEATHER]), add_special_tokens=False).ids
        assert told == plain + added
        refused = await http.post("/tokenize", json={"prompt": "hi", "tools": [WEATHER]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    async with stack(tmp_path / "other") as bare, bare.http() as http:
        refused = await http.post("/tokenize", json={**body, "tools": [WEATHER]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


async def test_a_chat_may_call_allowed_tools_alone(tmp_path: Path) -> None:
    """An empty answer is no call where the choice is left to the model."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    allowed = {"mode": "auto", "tools": [named]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    async with serving(tmp_path) as served, sdk(served) as client:
        fields = asking("<|eos|>", tool_choice=choice)
        answer = await client.chat.completions.create(**fields)
    assert answer.choices[0].message.content == ""
