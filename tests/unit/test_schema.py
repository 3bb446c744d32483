"""OpenAI bodies: every parameter arrives, wrong ones are named, unserved ones are refused."""

from __future__ import annotations

import json

import pytest

from frontend.api.not_served import NOT_SERVED, OF_CHATS, OF_COMPLETIONS, OTHER_NAMES
from frontend.api.openai_request import parse, to_chat, to_completion
from frontend.api.openai_schema import (
    ChatBody,
    CompletionBody,
    DecodingBody,
    DetokenizeBody,
    GenerationBody,
    StreamOptions,
    TokenizeBody,
)
from frontend.request import Beam, Chat
from tidemill.runtime.errors import InvalidRequest, Unsupported

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def completion(**fields: object) -> object:
    return to_completion(parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody))


def chat(**fields: object) -> object:
    return to_chat(parse(json.dumps({**HELLO, **fields}).encode(), ChatBody))


SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.4,
    "seed": 7,
    "max_tokens": 5,
    "min_tokens": 2,
}


def test_every_sampling_parameter_arrives() -> None:
    options = completion(**SAMPLING, logit_bias={"5": -1.5}).options
    for name, value in SAMPLING.items():
        assert getattr(options.sampling, name) == value
    assert options.sampling.logit_bias == {5: -1.5}


def test_every_other_option_arrives() -> None:
    options = completion(
        model="m",
        n=3,
        best_of=3,
        truncation_side="right",
        spaces_between_special_tokens=False,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        add_special_tokens=False,
        logprobs=2,
        prompt_logprobs=1,
        echo=True,
        truncate_prompt_tokens=9,
        cache_salt="s",
        priority=-4,
        decoding={"method": "block_diffusion", "params": {"threshold": 0.5}},
        steps=4,
        remasking="sequential",
        stream=True,
        stream_options={"include_canvas": True},
    ).options
    assert (options.model, options.n, options.stop) == ("m", 3, ("a", "b"))
    assert options.stop_token_ids == (1, 2)
    assert options.include_stop_str_in_output
    assert options.ignore_eos is True
    assert not options.skip_special_tokens
    assert options.add_special_tokens is False
    assert (options.logprobs, options.prompt_logprobs, options.echo) == (2, 1, True)
    assert (options.truncate_prompt_tokens, options.cache_salt, options.priority) == (9, "s", -4)
    assert (options.best_of, options.truncation_side) == (3, "right")
    assert not options.spaces_between_special_tokens
    assert options.decoding.method == "block_diffusion"
    assert options.decoding.params == {"threshold": 0.5, "steps": 4, "remasking": "sequential"}
    assert options.emit_canvas


def test_null_is_the_same_as_absent() -> None:
    names = {**CompletionBody.model_fields}
    del names["prompt"]
    assert completion(**dict.fromkeys(names)) == completion()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_the_four_kinds_of_prompt(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize("prompt", [None, 5, [], [1, "a"], [[1], "a"], [True], {"a": 1}, [1.5]])
def test_other_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"n": "many"}, "n"),
        ({"stop": [1]}, "stop[0]"),
        ({"logit_bias": {"word": 1}}, "logit_bias.word"),
        ({"stream_options": 3}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "captain", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        *(
            ({"messages": [{"role": "assistant", "tool_calls": calls}]}, "messages[0].tool_calls")
            for calls in (5, "f", {"a": 1}, True, [5], [{"function": 3}], [None])
        ),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"logprobs": 1}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "best_of": 2}, "best_of"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage"),
        ({"decoding": {"threshold": 0.5}}, "decoding.threshold"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ],
)
def test_wrong_values_name_their_field(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"structural_tag": "{}"},
        {"suffix": "end"},
        {"chat_template": "{{ x }}"},
        {"stop_regex": "a"},
        {"echo": True},
        {"store": True},
        {"max_new_tokens": 5},
        {"request_id": "mine"},
        {"typical_p": 0.5},
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(Unsupported) as caught:
        chat(**fields)
    assert caught.value.param == next(iter(fields))


def test_neutral_values_and_unknown_fields_pass() -> None:
    assert chat(tools=[], tool_choice="auto", response_format={"type": "text"}, n=1, best_of=1)
    assert chat(invented_by_an_agent={"a": 1}, store=False, parallel_tool_calls=True)


def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    (prompt,) = chat(tools=[TOOL], tool_choice="auto").prompts
    assert list(prompt.tools) == [TOOL]
    assert prompt.parallel_tool_calls
    (prompt,) = chat(tools=[TOOL], tool_choice="none", parallel_tool_calls=False).prompts
    assert prompt.tools == ()
    assert not prompt.parallel_tool_calls


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_reaches_the_template_under_the_name_it_reads(name: str) -> None:
    earlier = {"role": "assistant", "content": "Yes.", name: "Hm."}
    (prompt,) = chat(messages=[*HELLO["messages"], earlier, *HELLO["messages"]]).prompts
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert prompt.messages[1] == said


def test_chat_options() -> None:
    request = chat(max_tokens=3, max_completion_tokens=8, logprobs=True, top_logprobs=2, seed=-1)
    assert request.options.sampling.max_tokens == 8
    assert request.options.sampling.seed == 2**64 - 1
    assert request.options.logprobs == 2
    assert chat(logprobs=True).options.logprobs == 0
    assert chat(logprobs=False).options.logprobs is None


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (prompt,) = chat(messages=[{"role": "user", "content": parts}]).prompts
    assert prompt == Chat(messages=[{"role": "user", "content": "a\nb"}])
    said = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "No."}]
    (prompt,) = chat(messages=[{"role": "assistant", "content": said}]).prompts
    assert prompt == Chat(messages=[{"role": "assistant", "content": "a\nNo."}])
    for wrong in ({"type": "refusal"}, {"type": "text", "text": 5}, "a"):
        with pytest.raises(InvalidRequest, match="content"):
            chat(messages=[{"role": "user", "content": [wrong]}])
    for kind in ([], 5):
        with pytest.raises(Unsupported, match="of type"):
            chat(messages=[{"role": "user", "content": [{"type": kind}]}])
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(Unsupported, match="image_url"):
        chat(messages=[{"role": "user", "content": image}])


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"n": NaN}'],
)
def test_bodies_that_are_not_json_objects(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, CompletionBody)
    assert caught.value.reason == "INVALID_JSON"


def test_what_completions_do_not_know_is_refused_with_what_to_use() -> None:
    with pytest.raises(
        Unsupported, match="top_logprobs is not served here; use logprobs"
    ) as caught:
        completion(top_logprobs=2)
    assert caught.value.param == "top_logprobs"
    with pytest.raises(InvalidRequest, match=r"logprobs: .*valid integer.*True"):
        completion(logprobs=True)
    assert completion(top_logprobs=None, add_generation_prompt=False) == completion()


def test_other_names_mean_the_same() -> None:
    assert completion(max_completion_tokens=7).options.sampling.max_tokens == 7
    assert completion(min_new_tokens=2).options.sampling.min_tokens == 2
    assert completion(min_new_tokens=2, min_tokens=1).options.sampling.min_tokens == 1


def test_the_other_routes_refuse_too() -> None:
    with pytest.raises(Unsupported) as caught:
        parse(b'{"tokens": [1], "prompt": "a", "tools": [{}]}', DetokenizeBody)
    assert caught.value.param == "tools"


# ---------------------------------------------------------------- completeness

EXAMPLES: dict[str, object] = {
    "model": "m", "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "n": 2,
    "max_tokens": 3, "max_completion_tokens": 3, "min_tokens": 1, "min_new_tokens": 1,
    "stop": "x", "stop_token_ids": [3], "include_stop_str_in_output": True, "ignore_eos": True,
    "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 2.0,
    "logit_bias": {"3": 1.0}, "prompt_logprobs": 1, "skip_special_tokens": False,
    "add_special_tokens": False, "truncate_prompt_tokens": 3, "priority": 3, "cache_salt": "x",
    "user": "x", "prompt_cache_key": "x",
    "decoding": {"method": "x"}, "threshold": 0.5, "steps": 3, "remasking": "x",
    "allowed_token_ids": [3], "bad_words": ["x"], "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "x"}, "guided_json": {}, "guided_regex": "x",
    "guided_choice": ["x"], "guided_grammar": "x", "json_schema": "{}", "regex": "x", "ebnf": "x",
    "grammar": "x", "use_beam_search": True,
    "best_of": 3, "spaces_between_special_tokens": False, "truncation_side": "right",
}  # fmt: skip
"""A value for each field of a body that changes the request behind it."""

OF_COMPLETION = {**EXAMPLES, "prompt": "other", "logprobs": 1, "echo": True, "suffix": "x"}
OF_CHAT = {
    **EXAMPLES,
    "messages": [{"role": "user", "content": "other"}],
    "logprobs": True,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template_kwargs": {"a": 1},
    "reasoning_effort": "low",
    "tools": [TOOL],
    "parallel_tool_calls": False,
}
OF_THE_ANSWER = {
    "stream": "test_frontend_openai: events instead of one object",
    "stream_options": "test_frontend_openai, and below",
    "return_token_ids": "test_frontend_openai: more in the answer",
    "top_logprobs": "test_chat_options: needs logprobs",
    "tool_choice": "test_tools_reach_the_template: needs tools",
    "include_reasoning": "test_frontend_tools: less in the answer",
    "length_penalty": "test_knobs_of_beam_search: needs use_beam_search",
    "early_stopping": "test_knobs_of_beam_search: needs use_beam_search",
}


def dropped(body: type[GenerationBody], examples: dict[str, object]) -> list[str]:
    """Fields of a body that do not change the request."""
    ask = chat if body is ChatBody else completion
    found = []
    for name in body.model_fields:
        if name not in OF_THE_ANSWER and (
            name not in examples or ask(**{name: examples[name]}) == ask()
        ):
            found.append(name)
    return found


def test_every_field_of_the_bodies_does_something() -> None:
    assert dropped(CompletionBody, OF_COMPLETION) == []
    assert dropped(ChatBody, OF_CHAT) == []
    streamed = completion(stream=True, stream_options={"include_canvas": True})
    assert streamed != completion(stream=True)
    shown = {"include_usage", "continuous_usage_stats"}  # test_frontend_openai
    assert set(StreamOptions.model_fields) == {"include_canvas", "include_obfuscation", *shown}
    with pytest.raises(InvalidRequest, match="include_obfuscation"):
        completion(stream=True, stream_options={"include_obfuscation": True})
    assert set(DecodingBody.model_fields) == {"method", "params"}


def test_knobs_of_beam_search() -> None:
    asked = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True, "n": 2}
    for body in (completion, chat):
        assert body(**asked).options.beam == Beam(2, 0.5, early_stopping=True)
        assert body(**asked, best_of=4).options.beam == Beam(4, 0.5, early_stopping=True)
        assert body(**asked, best_of=4).options.best_of is None
        assert body(use_beam_search=True).options.beam == Beam(1)
        assert body(use_beam_search=False, length_penalty=1.0).options.beam is None
    for name, value in (("length_penalty", 2.0), ("early_stopping", True)):
        with pytest.raises(InvalidRequest, match=f"{name} needs use_beam_search"):
            completion(**{name: value})


def test_the_check_notices_a_dropped_field() -> None:
    """Negative control: a new field that nobody reads."""

    class Longer(CompletionBody):
        invented: int | None = None

    assert dropped(Longer, OF_COMPLETION) == ["invented"]
    assert dropped(Longer, {**OF_COMPLETION, "invented": 5}) == ["invented"]


def test_each_route_refuses_what_only_the_other_knows() -> None:
    completions, chats = set(CompletionBody.model_fields), set(ChatBody.model_fields)
    assert chats - completions == set(OF_COMPLETIONS)
    assert completions - chats == set(OF_CHATS)
    refused = {*NOT_SERVED, *OTHER_NAMES}
    assert not refused & (completions | chats), "a served field is in a table of refused ones"
    for name in refused:
        for ask in (completion, chat):
            with pytest.raises(Unsupported) as caught:
                ask(**{name: "asks for something"})
            assert caught.value.param == name


def test_every_field_of_the_tokenizer_routes_is_known() -> None:
    """A new one must be read in admin.py, with a test in test_frontend_bad_input or _openai."""
    flags = {"add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
    chats = {"messages", "tools", *flags}
    texts = {"model", "prompt", "add_special_tokens", "return_token_strs"}
    assert set(TokenizeBody.model_fields) == chats | texts
    assert set(DetokenizeBody.model_fields) == {"model", "tokens", "skip_special_tokens"}
