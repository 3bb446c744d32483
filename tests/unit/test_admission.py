"""What admission fills in and what it refuses, each with the field at fault and the way out."""

from __future__ import annotations

import math
import struct
from dataclasses import fields
from typing import Any

import pytest

from engine_service.core.admission import Admission, Admitted, Capacity
from engine_service.core.messages import Submit
from engine_service.core.params import MAX_LISTED_IDS, DecodingChoice, SamplingParams
from engine_service.core.strategy import ModelFacts
from engine_service.decoding.autoregressive import Autoregressive
from engine_service.decoding.block_diffusion import BlockDiffusion
from engine_service.decoding.reveal_knobs import RevealKnobs
from tidemill.runtime.errors import InvalidRequest, Unsupported

AR, BLOCK = "autoregressive", "block_diffusion"
STATIC = {"remasking": "low_confidence_static"}


def desk(
    *,
    num_pages: int = 100,
    token_budget: int = 64,
    logit_budget: int = 64,
    max_model_len: int = 128,
    default_method: str = AR,
    default_params: dict[str, Any] | None = None,
    defaults: SamplingParams | None = None,
    seed: int = 0,
) -> Admission:
    return Admission(
        model=ModelFacts(
            vocab_size=50,
            max_model_len=max_model_len,
            eos_token_ids=(7, 8),
            max_logprobs=5,
            weight_version="",
        ),
        capacity=Capacity(
            num_pages=num_pages,
            page_size=4,
            token_budget=token_budget,
            logit_budget=logit_budget,
            span_logits=1 << 20,
        ),
        strategies={AR: Autoregressive(), BLOCK: BlockDiffusion(block=8, mask_token_id=49)},
        default_method=default_method,
        default_params=default_params or {},
        defaults=defaults or SamplingParams(),
        seed=seed,
    )


def admit(
    admission: Admission,
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    method: str | None = None,
    knobs: dict[str, Any] | None = None,
    packed: bytes | None = None,
    emit_canvas: bool = False,
    **sampling: Any,
) -> Admitted:
    return admission.admit(
        Submit(
            key=1,
            request_id="r",
            prompt=struct.pack(f"<{len(prompt)}I", *prompt) if packed is None else packed,
            sampling=SamplingParams(**sampling),
            decoding=DecodingChoice(method=method, params=knobs or {}),
            emit_canvas=emit_canvas,
        )
    )


def test_defaults_are_filled_from_the_checkpoint_then_neutral() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, stop_token_ids=(3,), max_tokens=30)
    sampling = admit(desk(defaults=defaults)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 1.0)
    assert sampling.stop_token_ids == {3, 7, 8}
    assert sampling.suppress == ()
    assert sampling.max_tokens == 30
    asked = admit(desk(defaults=defaults), temperature=0.0, top_k=-1, max_tokens=40).sampling
    assert (asked.temperature, asked.top_k, asked.max_tokens) == (0.0, 0, 40)


def test_max_tokens_defaults_to_the_room_that_is_left() -> None:
    assert admit(desk()).sampling.max_tokens == 125
    assert admit(desk(num_pages=10)).sampling.max_tokens == 37
    assert admit(desk(num_pages=11), method=BLOCK).sampling.max_tokens == 37
    assert admit(desk(), prompt=(1,) * 127).sampling.max_tokens == 1


def test_ignore_eos_and_min_tokens() -> None:
    assert admit(desk(), ignore_eos=True, stop_token_ids=(4,)).sampling.stop_token_ids == {4}
    assert admit(desk(), min_tokens=2, stop_token_ids=(4,)).sampling.suppress == (4, 7, 8)


def test_seeds() -> None:
    assert admit(desk(), seed=2**64 - 1).sampling.seed == 2**64 - 1
    assert admit(desk(seed=5)).sampling.seed == 5
    assert len({admit(desk()).sampling.seed for _ in range(5)}) == 5


def test_knobs_are_parsed_once_and_default_knobs_belong_to_the_default_method() -> None:
    defaults = {"remasking": "low_confidence_dynamic", "threshold": 0.5}
    admission = desk(default_method=BLOCK, default_params=defaults)
    assert admit(admission).params == RevealKnobs(**defaults, steps=8)
    assert admit(admission, knobs={"steps": 4.0}).params == RevealKnobs(**defaults, steps=4)
    assert admit(admission, method=AR).strategy.name == AR
    other = admit(admission, knobs={"remasking": "sequential"}).params
    assert other == RevealKnobs(remasking="sequential", steps=8)


def test_a_knob_that_is_null_was_not_given_whichever_it_is() -> None:
    plain = admit(desk(), method=BLOCK)
    for field in fields(RevealKnobs):
        assert admit(desk(), method=BLOCK, knobs={field.name: None}).params == plain.params
    admission = desk(default_method=BLOCK, default_params={"threshold": 0.5, "factor": None})
    assert admit(admission, knobs={"threshold": None}).params.threshold == 0.5


def test_a_wrong_engine_default_fails_at_start_up() -> None:
    with pytest.raises(InvalidRequest, match="treshold"):
        desk(default_method=BLOCK, default_params={"treshold": 0.5})
    with pytest.raises(InvalidRequest, match="no_such"):
        desk(default_method="no_such")


def test_penalties_from_the_checkpoint_do_not_reach_methods_without_them() -> None:
    admission = desk(defaults=SamplingParams(repetition_penalty=1.1))
    assert admit(admission).sampling.repetition_penalty == 1.1
    assert admit(admission, method=BLOCK).sampling.repetition_penalty == 1.0


BAD_VALUES: list[tuple[str, Any]] = [
    *[("temperature", v) for v in (-1, math.nan, math.inf, -0.1, 1e-9, True, "hot")],
    *[("top_p", v) for v in (0, -0.1, 1.01, math.nan)],
    *[("top_k", v) for v in (-2, 1.5, True)],
    *[("min_p", v) for v in (-0.1, 1.1, math.nan)],
    *[("repetition_penalty", v) for v in (0, -1, math.inf, math.nan, 1e-30, 1e30)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, math.nan)],
    *[("max_tokens", v) for v in (0, -1)],
    *[("min_tokens", v) for v in (-1, 126)],
    *[("seed", v) for v in (-1, 2**64)],
    *[("logprobs", v) for v in (-1, 6)],
    *[("prompt_logprobs", v) for v in (-1, 6)],
    *[("stop_token_ids", v) for v in ((50,), (-1,), tuple(range(50)) * 6)],
    *[("stop_token_sequences", v) for v in (((),), ((1, 50),))],
    ("logit_bias", {50: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", dict.fromkeys(range(MAX_LISTED_IDS + 1), 0.0)),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        admit(desk(), **{name: value})
    assert refused.value.param == name
    assert name in refused.value.message or "sequence" in refused.value.message


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens is 5.*\[0, 4\]"):
        admit(desk(), min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (1, 50)}, r"token id 50.*\[0, 50\)"),
        ({"packed": b"123"}, "3 bytes"),
    ],
)
def test_a_bad_prompt_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        admit(desk(), **fields)
    assert refused.value.param == "prompt_token_ids"


@pytest.mark.parametrize(
    ("length", "max_tokens"), [(129, None), (128, None), (128, 1), (100, 29), (1, 128)]
)
def test_a_prompt_that_cannot_fit_is_refused_as_openai_words_it(
    length: int, max_tokens: int | None
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        admit(desk(), prompt=(1,) * length, max_tokens=max_tokens)
    error = refused.value
    assert error.message.startswith("This model's maximum context length is 128 tokens. ")
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert error.facts == {"n_prompt_tokens": str(length), "n_ctx": "128"}


def test_rule_c_what_could_never_run_names_the_flag_to_raise() -> None:
    with pytest.raises(InvalidRequest, match=r"need 12 KV pages.*has 11.*--num-pages"):
        admit(desk(num_pages=11), max_tokens=40, method=BLOCK)
    with pytest.raises(InvalidRequest, match="--num-pages"):
        admit(desk(num_pages=2), prompt=(1,) * 20)
    with pytest.raises(InvalidRequest, match=r"needs 8.*raise --token-budget to at least 8"):
        admit(desk(token_budget=7), method=BLOCK)
    with pytest.raises(InvalidRequest, match="--logit-budget"):
        admit(desk(logit_budget=7), method=BLOCK)
    admit(desk(token_budget=1, logit_budget=1), method=AR)


@pytest.mark.parametrize(
    ("method", "fields", "param"),
    [
        (BLOCK, {"presence_penalty": 0.5}, "presence_penalty"),
        (BLOCK, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (BLOCK, {"repetition_penalty": 1.2}, "repetition_penalty"),
        (BLOCK, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (AR, {"emit_canvas": True}, "emit_canvas"),
    ],
)
def test_what_a_method_cannot_do_is_unsupported_by_name(
    method: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(Unsupported, match=param) as refused:
        admit(desk(), method=method, **fields)
    assert refused.value.param == param


def test_neutral_penalties_are_no_request_for_penalties() -> None:
    admit(desk(), method=BLOCK, presence_penalty=0.0, repetition_penalty=1.0, logprobs=0)


@pytest.mark.parametrize(
    ("method", "knobs", "param", "message"),
    [
        ("beam", {}, "decoding.method", "autoregressive, block_diffusion"),
        (AR, {"threshold": 1}, "decoding.params.threshold", "none"),
        (BLOCK, {"treshold": 1}, "decoding.params.treshold", "remasking, threshold, steps"),
        (BLOCK, {"threshold": -0.1}, "decoding.params.threshold", "at least 0"),
        (BLOCK, {"threshold": math.nan}, "decoding.params.threshold", "finite"),
        (BLOCK, {"threshold": True}, "decoding.params.threshold", "True"),
        (BLOCK, STATIC | {"steps": 0}, "decoding.params.steps", r"\[1, 8\]"),
        (BLOCK, STATIC | {"steps": 2.5}, "decoding.params.steps", "whole"),
        (BLOCK, STATIC | {"steps": math.inf}, "decoding.params.steps", "whole"),
        (
            BLOCK,
            STATIC | {"threshold": 0.5},
            "decoding.params.threshold",
            "is not read by remasking",
        ),
        (BLOCK, {"remasking": "best"}, "decoding.params.remasking", "sequential"),
    ],
)
def test_a_wrong_method_or_knob_lists_what_is_known(
    method: str, knobs: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        admit(desk(), method=method, knobs=knobs)
    assert refused.value.param == param


def test_the_smallest_temperature_survives_the_wire() -> None:
    """A float32 field, as the contract has it, makes 9.9999997e-06 of 1e-5."""
    (sent,) = struct.unpack("f", struct.pack("f", 1e-5))
    assert sent < 1e-5
    assert admit(desk(), temperature=sent).sampling.temperature == sent
    with pytest.raises(InvalidRequest, match="at least 9e-6"):
        admit(desk(), temperature=8.9e-6)


def test_the_inverse_of_a_temperature_is_a_number() -> None:
    with pytest.raises(InvalidRequest, match="at most 1e30"):
        admit(desk(), temperature=1e39)
