"""Structured outputs of the built-in models: what they write under a grammar follows it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from tests.schemas import random_schema
from tidemill.llm import LLM
from tidemill.outputs import RequestOutput
from tidemill.runtime.errors import InvalidRequest, Unsupported
from tidemill.sampling_params import SamplingParams, StructuredOutputsParams

PROMPT = "json: tom 31 rome"
MODELS = ("demo", "demo-block")
ONE_BY_ONE = {"remasking": "prefix", "threshold": 2.0}
"""How block diffusion reveals under a constraint."""


@pytest.fixture(scope="module")
def made() -> dict[str, LLM]:
    return {}


@pytest.fixture(params=MODELS)
def llm(request: pytest.FixtureRequest, made: dict[str, LLM]) -> LLM:
    name = request.param
    if name not in made:
        made[name] = LLM(name, max_model_len=512)
    return made[name]


def params(asked: dict[str, Any], **fields: Any) -> SamplingParams:
    structured = StructuredOutputsParams(**asked)
    return SamplingParams(
        **{"max_tokens": 300, "temperature": 0.0, "structured_outputs": structured, **fields}
    )


def run(llm: LLM, asked: list[SamplingParams], prompt: Any = PROMPT) -> list[RequestOutput]:
    return llm.generate([prompt] * len(asked), asked, use_tqdm=False)


def check_schemas(llm: LLM, count: int, seed: int) -> None:
    """Every answer that ended by itself is valid; nearly all do, and they differ."""
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    asked = [
        params({"json": schema}, temperature=rng.choice([0.0, 1.0, 2.0]), seed=rng.randrange(2**31))
        for schema in schemas
    ]
    num_valid, texts = 0, set()
    for schema, output in zip(schemas, run(llm, asked), strict=True):
        (one,) = output.outputs
        texts.add(one.text)
        if one.finish_reason == "length":
            assert len(one.token_ids) == 300
            continue
        assert one.finish_reason == "stop", one
        jsonschema.validate(json.loads(one.text), schema)
        num_valid += 1
    assert num_valid >= 0.9 * count, num_valid
    assert len(texts) > count / 2


def test_random_schemas(llm: LLM, seed: int) -> None:
    check_schemas(llm, 100, seed)


@pytest.mark.slow
def test_a_thousand_random_schemas(llm: LLM, seed: int) -> None:
    check_schemas(llm, 1000, seed)


def test_control_without_a_grammar_few_answers_are_valid(llm: LLM, seed: int) -> None:
    rng, num_valid = random.Random(seed), 0
    schemas = [random_schema(rng) for _ in range(20)]
    asked = [SamplingParams(temperature=1.0, seed=i, max_tokens=100) for i in range(20)]
    for schema, output in zip(schemas, run(llm, asked), strict=True):
        try:
            jsonschema.validate(json.loads(output.outputs[0].text), schema)
            num_valid += 1
        except (ValueError, jsonschema.ValidationError):
            continue
    assert num_valid < 5


GRAMMARS: dict[str, tuple[dict[str, Any], str, str]] = {
    "regex": ({"regex": "[a-f]{2,6}(-[0-9]+)?!"}, "regex", "[a-f]{2,6}(-[0-9]+)?!"),
    "choice": ({"choice": ["rome", "tom", "romeo"]}, "choice", '["rome", "tom", "romeo"]'),
    "lark": ({"grammar": 'start: ("to" | "ro")+ "m" "e"?'}, "lark", 'start: ("to"|"ro")+ "m" "e"?'),
    "gbnf": ({"grammar": 'root ::= ("to" | "ro")+ "m"'}, "gbnf", 'root ::= ("to" | "ro")+ "m"'),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_tokens_are_those_of_a_matcher_stepped_by_hand(llm: LLM, name: str) -> None:
    """The reference asks for one token at a time, by a list of what its own matcher allows."""
    asked, form, text = GRAMMARS[name]
    tokenizer = LLTokenizer(
        (Path(llm.facts.tokenizer_dir) / "tokenizer.json").read_text(),
        n_vocab=llm.facts.vocab_size,
        eos_token=list(llm.facts.eos_token_ids),
    )
    matcher = LLMatcher(tokenizer, grammar_from(form, text))  # type: ignore[arg-type]
    knobs = ONE_BY_ONE if llm.facts.mask_token_id is not None else {}
    (output,) = run(llm, [params(asked, max_tokens=24)])
    tokens: list[int] = []
    while len(tokens) < 24 and not matcher.is_stopped():
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(llm.facts.vocab_size) if bits[i // 8] >> i % 8 & 1]
        one = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=allowed, method_params=knobs
        )
        (step,) = run(llm, [one], [*output.prompt_token_ids, *tokens])
        (token,) = step.outputs[0].token_ids
        assert token in allowed
        matcher.consume_token(token)
        tokens.append(token)
    assert output.outputs[0].token_ids == tokens
    assert output.outputs[0].finish_reason == ("stop" if matcher.is_stopped() else "length")


def test_neighbours_without_a_grammar_stay_as_they_are(llm: LLM) -> None:
    free = [
        SamplingParams(temperature=t, seed=i, max_tokens=40) for i, t in enumerate([0.0, 0.7, 1.3])
    ]
    alone = run(llm, free)
    bound = [params(asked) for asked, _, _ in GRAMMARS.values()]
    mixed = run(llm, [bound[0], free[0], bound[1], free[1], bound[2], free[2], bound[3]])
    for one, other in zip(alone, mixed[1::2], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    for asked, output in zip(bound, mixed[::2], strict=True):
        (by_itself,) = run(llm, [asked])
        assert by_itself.outputs[0].token_ids == output.outputs[0].token_ids


def test_json_objects_structural_tags_and_stop_strings(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tag = {"begin": '{"', "schema": schema, "end": ">"}
    tags = {"structures": [tag], "triggers": ["{"]}
    stops = params({"regex": "[a-z]{4}:[a-z]{9}"}, stop=":", n=3, temperature=1.0, seed=4)
    anything, tagged, stopped = run(
        llm, [params({"json_object": True}), params({"structural_tag": tags}), stops]
    )
    (one,) = anything.outputs
    assert one.finish_reason == "length" or isinstance(json.loads(one.text), dict)
    (one,) = tagged.outputs
    before, begun, rest = one.text.partition('{"')
    assert "{" not in before
    if begun and ">" in rest:
        jsonschema.validate(json.loads(rest.partition(">")[0]), schema)
    assert len({one.text for one in stopped.outputs}) > 1
    for one in stopped.outputs:
        assert (len(one.text), one.finish_reason, one.stop_reason) == (4, "stop", ":")


def test_bad_words_are_not_said(llm: LLM) -> None:
    (free,) = run(llm, [SamplingParams(temperature=0.0, max_tokens=40)])
    word = free.outputs[0].text[3:6]
    assert len(word) == 3
    (bound,) = run(llm, [SamplingParams(temperature=0.0, max_tokens=40, bad_words=[word])])
    assert word not in bound.outputs[0].text
    assert bound.outputs[0].text


TAG = {"begin": "a", "schema": {}, "end": ""}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"json": {"type": "nope"}}, "Invalid type: nope"),
    "reference": ({"json": {"$ref": "#/nope"}}, "does not exist"),
    "keyword": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "endless": ({"json": {"$ref": "#"}}, "no text fits it"),
    "nothing": ({"regex": r"[^\s\S]"}, "no text fits it"),
    "a circle": ({"grammar": "start: start"}, "no text fits it"),
    "not json": ({"json": "{"}, "json schema does not compile"),
    "regex": ({"regex": "(["}, "regex parse error"),
    "grammar": ({"grammar": "start: nope"}, "unknown name"),
    "gbnf": ({"grammar": "root = nope"}, "does not compile"),
    "structural_tag": ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "is empty"),
    "no end": (
        {"structural_tag": {"structures": [{"begin": "a", "schema": {}}], "triggers": ["a"]}},
        "'end' is missing",
    ),
    "a number": (
        {"structural_tag": {"structures": [{**TAG, "begin": 5}], "triggers": ["a"]}},
        "structural tag does not compile",
    ),
    "trigger": ({"structural_tag": {"structures": [TAG], "triggers": []}}, "no trigger"),
    "long": ({"regex": "a" * (1 << 20) + "b"}, "at most"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_compile_is_named(llm: LLM, name: str) -> None:
    asked, words = WRONG[name]
    with pytest.raises(InvalidRequest, match=words) as caught:
        run(llm, [params(asked)])
    assert caught.value.param == f"structured_outputs.{next(iter(asked))}"
    assert caught.value.reason == "GRAMMAR_INVALID"
    assert not llm.has_unfinished_requests


def test_an_engine_without_a_tokenizer_or_a_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"nothing")
    llm = LLM("demo", tokenizer=str(tmp_path), skip_tokenizer_init=True, max_model_len=512)
    with pytest.raises(Unsupported, match=r"tokenizer\.model cannot be") as caught:
        run(llm, [params({"regex": "a"})], [1, 2])
    assert caught.value.param == "structured_outputs.regex"
    simulated = LLM("demo", executor="simulated", skip_tokenizer_init=True, max_model_len=512)
    for asked in (params({"regex": "a"}), SamplingParams(allowed_token_ids=[1])):
        with pytest.raises(Unsupported, match="does not serve"):
            run(simulated, [asked], [1, 2])
