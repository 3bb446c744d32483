"""Parameters that the frontend computes, over the real stack: what is cut, ranked and told.

Each is compared with what a client could have done by hand.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.real_stack import Faces
from tidemill.v1 import text_pb2 as pb

TEXT = "sort: 9 3 7 1 8 ="
CHAT = [{"role": "user", "content": "json: tom 31 rome"}]
PLACES = {"/v1/completions": {"prompt": TEXT}, "/v1/chat/completions": {"messages": CHAT}}


async def asked(faces: Faces, path: str, **body: Any) -> Any:
    answer = await faces.http.post(path, json={**PLACES[path], **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(faces: Faces, path: str, **body: Any) -> list[Any]:
    answer = await faces.http.post(path, json={**PLACES[path], **body, "stream": True})
    assert answer.status_code == 200, answer.text
    return [json.loads(event[6:]) for event in answer.text.split("\n\n")[:-2]]


async def limits(faces: Faces, **body: Any) -> Any:
    return (await faces.http.post("/tokenize", json=body or {"prompt": TEXT})).json()


def text_of(choice: Any) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def scores_of(choice: Any) -> list[float]:
    given = choice["logprobs"]
    return given.get("token_logprobs") or [entry["logprob"] for entry in given["content"]]


# ---------------------------------------------------------------- best_of


@pytest.mark.parametrize("path", PLACES)
async def test_best_of_returns_the_likeliest_of_all(faces: Faces, path: str, seed: int) -> None:
    """The same seed makes the same sequences, whether all of them are returned or the best."""
    differs = False
    for one in range(seed % 1000, seed % 1000 + 5):
        drawn = {"temperature": 4.0, "seed": one, "max_tokens": 8}
        all_six = await asked(faces, path, n=6, logprobs=True if "chat" in path else 0, **drawn)
        order = sorted(
            all_six["choices"], key=lambda c: -sum(scores_of(c)) / max(1, len(scores_of(c)))
        )
        best = await asked(faces, path, n=2, best_of=6, **drawn)
        assert [text_of(c) for c in best["choices"]] == [text_of(c) for c in order[:2]]
        assert [c["index"] for c in best["choices"]] == [0, 1]
        assert all(c["logprobs"] is None for c in best["choices"])
        counted, expected = best["usage"], all_six["usage"]
        assert counted["completion_tokens"] == expected["completion_tokens"]
        assert counted["prompt_tokens"] == expected["prompt_tokens"]
        differs |= [text_of(c) for c in order[:2]] != [text_of(c) for c in all_six["choices"][:2]]
    assert differs, "taking the first two would have passed"


async def test_best_of_several_prompts_over_grpc_too(faces: Faces) -> None:
    prompts = [TEXT, "add: 12+30 =", "reverse: abc ="]
    wanted = {"best_of": 4, "seed": 5, "temperature": 1.5, "max_tokens": 6, "logprobs": 0}
    beside = {"return_token_ids": True, "prompt_logprobs": 0}
    together = await asked(faces, "/v1/completions", prompt=prompts, **wanted, **beside)
    assert [c["index"] for c in together["choices"]] == [0, 1, 2]
    for prompt, choice in zip(prompts, together["choices"], strict=True):
        sampling = {"seed": 5, "temperature": 1.5, "max_tokens": 6}
        options = {"sampling": sampling, "best_of": 4, "return_token_ids": True}
        request = pb.TextServiceGenerateRequest(prompt={"text": prompt}, options=options)
        answer = await faces.text.Generate(request)
        (alone,) = answer.choices
        assert (alone.index, alone.text) == (0, choice["text"])
        assert list(alone.token_ids) == choice["token_ids"]
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
        assert list(answer.prompt_token_ids) == choice["prompt_token_ids"]
        assert choice["prompt_token_ids"] == (await limits(faces, prompt=prompt))["tokens"]
        assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
        assert answer.usage.output_tokens >= 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"best_of": 2, "n": 3}, "best_of is 2 and n is 3; best_of must lie in 3.."),
        ({"best_of": 10**6}, "best_of must lie in 1.."),
        ({"best_of": 2, "stream": True}, "cannot be streamed; set stream to false"),
        ({"best_of": 16, "prompt": ["a"] * 65}, "best_of is 16 for each of 65 prompts"),
    ],
)
async def test_what_best_of_cannot_be(faces: Faces, fields: dict[str, Any], words: str) -> None:
    answer = await faces.http.post("/v1/completions", json={"prompt": "a", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "best_of")
    assert words in error["message"]


# ---------------------------------------------------------------- truncation


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("side", ["left", "right", None])
async def test_truncated_prompts_are_the_kept_tokens(
    faces: Faces, path: str, side: str | None
) -> None:
    given = {"prompt": TEXT} if "prompt" in PLACES[path] else {"messages": CHAT}
    whole = (await limits(faces, **given))["tokens"]
    beside = {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
    for keep in (1, 3, len(whole), len(whole) + 5):
        kept = whole[:keep] if side == "right" else whole[-keep:]
        cut = {"truncate_prompt_tokens": keep, "truncation_side": side}
        answer = await asked(faces, path, **beside, **cut)
        by_hand = await asked(faces, "/v1/completions", prompt=kept, **beside)
        told = (answer if "messages" in given else answer["choices"][0])["prompt_token_ids"]
        assert told == by_hand["choices"][0]["prompt_token_ids"] == kept
        assert answer["choices"][0]["token_ids"] == by_hand["choices"][0]["token_ids"]
        assert answer["usage"]["prompt_tokens"] == min(keep, len(whole))


async def test_minus_one_keeps_what_the_context_leaves(faces: Faces) -> None:
    limit = (await limits(faces))["max_model_len"]
    long, lone = [65 + i % 20 for i in range(2 * limit)], {"truncate_prompt_tokens": -1}
    for side, kept in (("left", slice(20 - limit, None)), ("right", slice(limit - 20))):
        wanted = {"truncation_side": side, "return_token_ids": True, **lone}
        sampling = {"max_tokens": 20, "temperature": 0}
        answer = await asked(faces, "/v1/completions", prompt=long, **sampling, **wanted)
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == long[kept]
        request = pb.TextServiceGenerateRequest(
            prompt={"tokens": {"token_ids": long}}, options={"sampling": sampling, **wanted}
        )
        answer = await faces.text.Generate(request)
        assert list(answer.prompt_token_ids) == long[kept]
        assert answer.choices[0].text == choice["text"]
    refused = await faces.http.post(
        "/v1/completions", json={"prompt": long, "max_tokens": limit, **lone}
    )
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"truncation_side": "middle", "truncate_prompt_tokens": 3}, "truncation_side"),
    ],
)
async def test_what_truncation_cannot_be(faces: Faces, fields: dict[str, Any], param: str) -> None:
    answer = await faces.http.post("/v1/completions", json={"prompt": "a", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    call = faces.text.Generate(pb.TextServiceGenerateRequest(prompt={"text": "a"}, options=fields))
    assert param in await call.details()


# ---------------------------------------------------------------- token ids


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("stop", [None, "o", "\n"])
async def test_streams_tell_the_same_token_ids(faces: Faces, path: str, stop: str | None) -> None:
    """Those of the prompt once for each choice, in its first chunk."""
    wanted = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 30, "return_token_ids": True}
    if stop is not None:
        wanted["stop"] = stop
    whole = await asked(faces, path, **wanted)
    chunks = await events(faces, path, **wanted)
    for choice in whole["choices"]:
        own = [c for c in chunks if c["choices"][0]["index"] == choice["index"]]
        told = [token for c in own for token in c["choices"][0].get("token_ids") or []]
        assert told == choice["token_ids"] != []
        places = own if "chat" in path else [c["choices"][0] for c in own]
        assert ["prompt_token_ids" in place for place in places] == [True] + [False] * (
            len(places) - 1
        )
        prompt = choice.get("prompt_token_ids") or whole["prompt_token_ids"]
        assert places[0]["prompt_token_ids"] == prompt
    num_told = sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert num_told == whole["usage"]["completion_tokens"]
    wanted["return_token_ids"] = False
    assert "token_ids" not in json.dumps(await asked(faces, path, **wanted))
    assert "token_ids" not in json.dumps(await events(faces, path, **wanted))


async def test_grpc_tells_token_ids_too(faces: Faces) -> None:
    sampling = {"max_tokens": 6, "temperature": 0}
    options = {"sampling": sampling, "return_token_ids": True, "n": 2}
    message = {"role": "user", "parts": [{"text": CHAT[0]["content"]}]}
    for method, whole, piece, given, tokenized in (
        ("Generate", pb.TextServiceGenerateRequest, pb.GenerateStreamRequest,
         {"prompt": {"text": TEXT}}, {"prompt": TEXT}),
        ("Chat", pb.ChatRequest, pb.ChatStreamRequest,
         {"messages": [message]}, {"messages": CHAT}),
    ):  # fmt: skip
        prompt = (await limits(faces, **tokenized))["tokens"]
        answer = await getattr(faces.text, method)(whole(**given, options=options))
        assert list(answer.prompt_token_ids) == prompt
        stream = getattr(faces.text, f"{method}Stream")(piece(**given, options=options))
        news = [one async for one in stream]
        assert [list(one.prompt_token_ids) for one in news] == [prompt] + [[]] * (len(news) - 1)
        for choice in answer.choices:
            told = [t for one in news[:-1] if one.choice.index == choice.index
                    for t in one.choice.token_ids]  # fmt: skip
            assert told == list(choice.token_ids) != []
        plain = await getattr(faces.text, method)(whole(**given))
        assert not plain.prompt_token_ids
        assert not plain.choices[0].token_ids


# ---------------------------------------------------------------- what ends a text


@pytest.mark.parametrize("path", PLACES)
async def test_a_bias_is_keyed_by_the_id_as_a_string(faces: Faces, path: str) -> None:
    greedy = {"temperature": 0, "max_tokens": 4, "return_token_ids": True}
    plain = (await asked(faces, path, **greedy))["choices"][0]["token_ids"]
    (forced,) = (await limits(faces, prompt="z", add_special_tokens=False))["tokens"]
    assert forced not in plain
    biased = await asked(faces, path, **greedy, logit_bias={str(forced): 100})
    assert biased["choices"][0]["token_ids"] == [forced] * 4
    barred = await asked(faces, path, **greedy, logit_bias={str(plain[0]): -100})
    assert barred["choices"][0]["token_ids"][0] != plain[0]


@pytest.mark.parametrize("path", PLACES)
async def test_min_tokens_and_the_end_that_is_shown(faces: Faces, path: str) -> None:
    """The end-of-text token is held off, then counted, and shown on request only."""
    greedy = {"temperature": 0, "max_tokens": 60, "return_token_ids": True}
    plain = (await asked(faces, path, **greedy))["choices"][0]
    assert plain["finish_reason"] == "stop"
    end = plain["token_ids"][-1]
    longer = len(plain["token_ids"]) + 3
    held = (await asked(faces, path, **greedy, min_tokens=longer))["choices"][0]["token_ids"]
    assert held[: longer - 4] == plain["token_ids"][:-1]
    assert end not in held[: longer - 1]
    assert len(held) >= longer
    shown: dict[tuple[bool, bool], str] = {}
    for skips in (True, False):
        for includes in (True, False):
            flags = {"skip_special_tokens": skips, "include_stop_str_in_output": includes}
            answer = await asked(faces, path, **greedy, **flags)
            shown[skips, includes] = text_of(answer["choices"][0])
    word = (await faces.http.post(
        "/detokenize", json={"tokens": [end], "skip_special_tokens": False}
    )).json()["prompt"]  # fmt: skip
    text = text_of(plain)
    assert word
    assert shown == {
        (True, True): text,
        (True, False): text,
        (False, True): text + word,
        (False, False): text,
    }
    for spaces in (True, False):  # byte-level vocabularies put no spaces between tokens
        flags = {"skip_special_tokens": False, "include_stop_str_in_output": True}
        answer = await asked(faces, path, **greedy, **flags, spaces_between_special_tokens=spaces)
        assert text_of(answer["choices"][0]) == text + word
