"""No field of the gateways' contract is silently dropped, and what each means.

The walk goes through the descriptors of the wheel, so that a new version's field fails here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from engine_service.core.params import ConstraintSpec
from engine_service.server.vllm_engine import convert_in
from engine_service.server.vllm_engine.convert_in import Stops
from engine_service.server.vllm_engine.text import StopWatch
from tests.unit.test_contract_fields import dropped
from tidemill.runtime.errors import InvalidRequest, Unsupported

pb: Any = vllm_engine_pb2

HINTS = {
    "tokenized.original_text": "for reference, says the contract; the ids count",
    "stream": "test_vllm_engine: shapes the answer",
    "sampling_params.spaces_between_special_tokens": "about text; answers are tokens",
    "sampling_params.include_stop_str_in_output": "about text; the tokens of a stop are told",
    "sampling_params.grammar_from_first_token": "every grammar starts there in this engine",
    "sampling_params.skip_special_tokens": "counts beside stop strings alone",
}
"""Fields that need no effect on what the core is asked, and why."""


def read(request: Any) -> object:
    convert_in.check(request)
    prompt = request.tokenized.input_ids
    submits = convert_in.to_submits(request, prompt, max_model_len=9, remaining_s=None)
    named = bool(request.request_id) and submits[0].request_id
    plain = [dataclasses.replace(one, arrival_ns=0, request_id="") for one in submits]
    return plain, named, convert_in.to_stops(request)


def base(**sampling: Any) -> Any:
    tokenized = pb.TokenizedInput(input_ids=[1, 2, 5, 6])
    return pb.GenerateRequest(tokenized=tokenized, sampling_params=pb.SamplingParams(**sampling))


def test_generate() -> None:
    assert dropped(base(), read, HINTS) == []


def test_embed() -> None:
    def embedded(request: Any) -> object:
        submit = convert_in.to_embed_submit(request, None)
        named = bool(request.request_id) and submit.request_id
        return named, dataclasses.replace(submit, arrival_ns=0, request_id="")

    request = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[1]))
    assert dropped(request, embedded, HINTS) == []


def test_the_walk_notices_a_dropped_field() -> None:
    """Negative control."""
    assert set(HINTS) == set(dropped(base(), read, {}))
    assert "sampling_params.top_k" in dropped(base(), lambda request: None, HINTS)


def test_what_is_unset_means_what_gateways_expect() -> None:
    (submit,) = convert_in.to_submits(base(), [1], max_model_len=9, remaining_s=None)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (sampling.repetition_penalty, sampling.max_tokens) == (1.0, None)
    assert (sampling.ignore_eos, sampling.logprobs, sampling.seed) == (False, None, None)
    greedy = base(temperature=0.0, seed=-1, max_tokens=0)
    (submit,) = convert_in.to_submits(greedy, [1], max_model_len=9, remaining_s=None)
    assert (submit.sampling.temperature, submit.sampling.seed) == (0.0, 2**32 - 1)
    assert submit.sampling.max_tokens == 0, "refused by admission, not taken for unset"


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json_schema": "{}"}, "json_schema", "{}"),
        ({"regex": "a"}, "regex", "a"),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"structural_tag": "{}"}, "structural_tag", "{}"),
        ({"json_object": True}, "json_object", ""),
        ({"choice": {"choices": ["a", "b"]}}, "choice", '["a", "b"]'),
    ],
)
def test_constraints(given: Any, kind: str, text: str) -> None:
    (submit,) = convert_in.to_submits(base(**given), [1], max_model_len=9, remaining_s=None)
    assert submit.constraint == ConstraintSpec(kind, text)


@pytest.mark.parametrize(("most", "kept"), [(2, 2), (30, 10), (-1, 8)])
def test_prompts_are_cut_at_their_beginning(most: int, kept: int) -> None:
    request, prompt = base(truncate_prompt_tokens=most), list(range(10))
    (submit,) = convert_in.to_submits(request, prompt, max_model_len=9, remaining_s=None)
    assert list(submit.prompt[::4]) == prompt[-kept:]


def test_other_ranks_and_media_are_refused_by_name() -> None:
    for given in ({"data_parallel_rank": 1}, {"mm_inputs": {}}, {"extra_mm_inputs": [{}]}):
        with pytest.raises(Unsupported, match=next(iter(given))):
            convert_in.check(pb.GenerateRequest(text="a", **given))
    convert_in.check(pb.GenerateRequest(text="a", data_parallel_rank=0))
    with pytest.raises(InvalidRequest, match="request_id has 257"):
        read(pb.GenerateRequest(request_id="x" * 257, tokenized={"input_ids": [1]}))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    folder = Path(__file__).parents[2] / "tidemill" / "builtin" / "demo"
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def watched(tokenizer: Any, text: str, *stops: str, run: int, min_tokens: int = 0) -> Any:
    """(tokens up to the stop, the stop) when tokens come `run` at a time."""
    watch, ids, fed = StopWatch(tokenizer, Stops(stops, True, min_tokens)), list(text.encode()), 0
    while fed < len(ids):
        found = watch.feed(ids[fed : fed + run])
        if found is not None:
            return fed + found[0], found[1]
        fed += run
    return None


@pytest.mark.parametrize("run", [1, 2, 3, 100])
def test_stop_strings_are_found_wherever_runs_end(tokenizer: Any, run: int) -> None:
    assert watched(tokenizer, "a wörd and more", "wörd", "more", run=run) == (7, "wörd")
    assert watched(tokenizer, "nothing", "nothings", run=run) is None
    assert watched(tokenizer, "xaxaxb", "xaxb", run=run) == (6, "xaxb")
    assert watched(tokenizer, "abab", "ab", run=run, min_tokens=2) == (4, "ab"), "the second one"


def test_bytes_that_are_no_character_end_nothing() -> None:
    """A byte that begins a character, and no rest of it: the library reads text anew then that it
    has told already."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"b": 256, "END": 257}
    broken = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    broken.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream, ids = DecodeStream(skip_special_tokens=True), [256, 0x0A, 0xF0, 256, 256, 257]
    with pytest.raises(Exception, match="Invalid prefix"):
        [stream.step(broken, token) for token in ids]
    for run in (1, 2, len(ids)):
        watch, found = StopWatch(broken, Stops(("END",), True, 0)), None
        for start in range(0, len(ids), run):
            found = watch.feed(ids[start : start + run])
        assert found is not None
        assert found[1] == "END"
        watch = StopWatch(broken, Stops(("bb", "b\ufffd"), True, 0))
        fed = [256, 0x45, 0xF0, 256]  # b, E, no character, b
        told = [watch.feed(fed[start : start + run]) for start in range(0, len(fed), run)]
        assert not any(told), "what stands between is not left out"
