"""What a decoding method can do, beside what a request asks of it. It knows no method by name."""

from __future__ import annotations

from dataclasses import replace

from engine_service.core.checks import penalty_is_neutral
from engine_service.core.choosable import is_asked, is_stepwise
from engine_service.core.messages import Submit
from engine_service.core.params import SamplingParams
from engine_service.core.strategy import DecodeStrategy
from tidemill.runtime.errors import Unsupported

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def check_supported(strategy: DecodeStrategy, submit: Submit) -> bool:
    """Refuses what the method cannot do, naming the parameter; whether what may be chosen depends
    on what was."""
    asked = submit.sampling
    stepwise = is_stepwise(asked, submit.constraint)
    wanted = [
        (name, "penalties", not penalty_is_neutral(name, getattr(asked, name)))
        for name in PENALTIES
    ]
    wanted += [
        ("logit_bias", "logit_bias", bool(asked.logit_bias)),
        ("min_tokens", "min_tokens", bool(asked.min_tokens)),
        ("logprobs", "logprobs", asked.logprobs is not None),
        ("prompt_logprobs", "prompt_logprobs", asked.prompt_logprobs is not None),
        ("emit_canvas", "canvas", submit.emit_canvas),
        ("pinned", "pinned", bool(submit.pinned)),
        (is_asked(asked, submit.constraint), "constraint", stepwise),
    ]
    for param, capability, is_wanted in wanted:
        if is_wanted and capability not in strategy.supports:
            what = f"{param} of several tokens each" if param == "bad_words" else param
            if param.startswith("constraint."):  # HTTP has other names for it
                what = f"grammars ({param})"
            raise Unsupported(
                f"The decoding method {strategy.name!r} does not support {what}; leave it out.",
                param=param,
            )
    if stepwise and submit.pinned:
        raise Unsupported(
            "pinned tokens do not go with what says token by token what may follow; leave out "
            f"either of them, pinned or {is_asked(asked, submit.constraint)}.",
            param="pinned",
        )
    return stepwise


def with_defaults(
    asked: SamplingParams, defaults: SamplingParams, strategy: DecodeStrategy
) -> SamplingParams:
    """Unset fields take the checkpoint's value, except penalties that the method cannot apply."""
    names = ["temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos"]
    if "penalties" in strategy.supports:
        names += PENALTIES
    filled = {name: getattr(defaults, name) for name in names if getattr(asked, name) is None}
    filled = {name: value for name, value in filled.items() if value is not None}
    if defaults.stop_token_ids:
        filled["stop_token_ids"] = (*asked.stop_token_ids, *defaults.stop_token_ids)
    return replace(asked, **filled) if filled else asked
