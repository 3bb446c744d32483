"""Which engines go together: one model, one tokenizer. It does not know connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from frontend.messages import EngineFacts
from tidemill.runtime.errors import FailedPrecondition


def common_facts(facts: EngineFacts, others: Mapping[str, EngineFacts]) -> EngineFacts:
    """What holds for an engine and those that are in already, by address. Raises FailedPrecondition
    when it is not one of them."""
    for address, theirs in others.items():
        _check_same(facts, theirs, address)
    narrow = [facts, *others.values()]
    return replace(
        facts,
        max_model_len=min(one.max_model_len for one in narrow),
        max_logprobs=min(one.max_logprobs for one in narrow),
    )


def is_same_model(facts: EngineFacts, theirs: EngineFacts) -> bool:
    """Whether token ids that were made for one of them mean the same to the other."""
    return _of_model(facts) == _of_model(theirs)


def _of_model(facts: EngineFacts) -> dict[str, str]:
    return {
        "model": facts.model_id,
        "digest of hf_overrides": _overrides(facts),
        "tokenizer": facts.tokenizer_sha256,
    }


def _check_same(facts: EngineFacts, theirs: EngineFacts, address: str) -> None:
    if facts.instance_id == theirs.instance_id:
        raise FailedPrecondition(
            f"it is the same engine as {address} under another address", reason="SAME_ENGINE"
        )
    others = _of_model(theirs)
    for what, ours in _of_model(facts).items():
        other = others[what]
        if ours != other:
            raise FailedPrecondition(
                f"its {what} is {ours!r}, and that of {address} is {other!r}; engines behind one "
                "frontend serve the same model",
                reason="OTHER_MODEL",
            )
    if {facts.role, theirs.role} == {"prefill", "decode"}:
        _check_pair(facts, theirs, address)


def _overrides(facts: EngineFacts) -> str:
    """Empty where nothing is said over config.json."""
    return facts.weight_version.partition("+")[2]


def _check_pair(facts: EngineFacts, theirs: EngineFacts, address: str) -> None:
    """A prompt computed by one of them is continued by the other, from its KV pages."""
    for name in ("weight_version", "dtype", "page_size", "block_length"):
        ours, other = getattr(facts, name), getattr(theirs, name)
        if ours != other:
            raise FailedPrecondition(
                f"its {name} is {ours!r}, and that of {address} is {other!r}; a prefill and a "
                "decode engine need the same weights, number format and page size",
                reason="KV_LAYOUT",
            )
