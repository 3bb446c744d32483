"""What callers of `tidemill.LLM` give it: prompts one or many, as texts or token ids, and suffixes.

Texts become tokens here, and a suffix becomes a gap by the frontend's own rules, so that offline
and served requests are read the same. It does not know the engine's loop.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, cast

from engine_service.core.checks import check_whole
from engine_service.core.facts import EngineFacts as CoreFacts
from frontend.choosable import bad_word_ids
from frontend.gap import Gap, check_gap, check_suffix_ids, check_suffix_len, fit_prompt
from frontend.messages import EngineFacts
from frontend.request import Options, Sampling, TextRequest
from frontend.tokenizer import TextTokenizer, Vocabulary
from frontend.validation import check_truncation, truncated
from tidemill.given import ids_of, of_kind, several, wrong_kind
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest
from tidemill.sampling_params import BeamSearchParams, SamplingParams


class TextPrompt(NamedTuple):
    """A prompt as the engine gets it; `gap` is there when a suffix follows. `goes_on`: what is
    generated goes on in its text."""

    text: str | None
    token_ids: list[int]
    gap: Gap | None = None
    goes_on: bool = True


Prompt = str | Sequence[int] | Mapping[str, Any] | TextPrompt
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}; a "suffix" beside either is a
text that stands behind what is generated, as in `LLM.infill`."""

_KEYS = ("prompt", "prompt_token_ids", "suffix")
_WORDING = "a text, token ids, or a dictionary with either"


def open_tokenizer(model: str, facts: CoreFacts) -> TextTokenizer:
    """The model's; raises FailedPrecondition where there is none, or none that can be used."""
    if not facts.tokenizer_dir:
        raise FailedPrecondition(
            f"{model} has no tokenizer files; put them beside config.json, name a folder "
            "with tokenizer=..., or pass skip_tokenizer_init=True and prompts as token ids",
            reason="TOKENIZER_MISSING",
        )
    return TextTokenizer(Path(facts.tokenizer_dir))


class PromptReader:
    """Reads prompts for one engine; without a tokenizer these must be token ids."""

    def __init__(self, tokenizer: TextTokenizer | None, facts: CoreFacts) -> None:
        self._tokenizer = tokenizer
        self._facts = facts

    def need_tokenizer(self, param: str = "prompt") -> TextTokenizer:
        """Raises InvalidRequest, naming the text that cannot be read, where there is none."""
        if self._tokenizer is None:
            raise InvalidRequest(
                f"this LLM was made with skip_tokenizer_init and reads no text in {param}: give "
                "prompts as token ids, and no suffix",
                param=param,
            )
        return self._tokenizer

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens; '' where there is no tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def read(self, prompt: Prompt, params: SamplingParams) -> TextPrompt:
        """Raises InvalidRequest, or Unsupported for a suffix where nothing can be filled in."""
        read, suffix = self._read(prompt)
        read = self._truncated(read, params)
        if suffix is None or suffix == "":
            return read
        return read._replace(gap=self._open_gap(read, suffix, params))

    def _read(self, prompt: Prompt) -> tuple[TextPrompt, Any]:
        """The prompt, and the suffix that stands beside it."""
        if isinstance(prompt, TextPrompt):
            return prompt, None
        if isinstance(prompt, str):
            ids = self.need_tokenizer().encode(prompt, add_special_tokens=True)
            return TextPrompt(prompt, ids), None
        if not isinstance(prompt, Mapping):
            return TextPrompt(None, _ids(prompt)), None
        unknown = [key for key in prompt if key not in _KEYS]
        if unknown:
            raise InvalidRequest(
                f"a prompt given as a dictionary has {unknown[0]!r}; it may have "
                f"{', '.join(_KEYS)}: leave the rest out",
                param="prompt",
            )
        if "prompt_token_ids" in prompt:
            text = of_kind("a prompt", "prompt", str | None, prompt.get("prompt"))
            read = TextPrompt(text, _ids(prompt["prompt_token_ids"]))
        elif "prompt" in prompt:
            read, _ = self._read(prompt["prompt"])
        else:
            raise InvalidRequest(
                "a prompt given as a dictionary needs `prompt` or `prompt_token_ids`",
                param="prompt",
            )
        return read, prompt.get("suffix")

    def _truncated(self, read: TextPrompt, params: SamplingParams) -> TextPrompt:
        """The prompt without what `truncate_prompt_tokens` cuts off, whose text is then unknown."""
        options = Options(
            sampling=Sampling(max_tokens=params.max_tokens),
            truncate_prompt_tokens=params.truncate_prompt_tokens,
            truncation_side=params.truncation_side,
        )
        check_truncation(options)
        kept = truncated(read.token_ids, options, self._facts.max_model_len)
        return (
            read if len(kept) == len(read.token_ids) else read._replace(text=None, token_ids=kept)
        )

    def _open_gap(self, prompt: TextPrompt, suffix: Any, params: SamplingParams) -> Gap:
        if not isinstance(suffix, str):
            raise InvalidRequest(f"suffix is {suffix!r}; it must be a text", param="suffix")
        tokenizer, facts = self.need_tokenizer("suffix"), as_heard(self._facts)
        lengths = Sampling(max_tokens=params.max_tokens, min_tokens=params.min_tokens)
        options = Options(sampling=lengths)
        check_gap(TextRequest(prompts=(), options=options, suffix=suffix), facts)
        if params.max_tokens is None:
            raise InvalidRequest(
                "max_tokens is None, and suffix needs a gap of a known length; max_tokens is the "
                "length of the gap: set it to 1 or more",
                param="max_tokens",
            )
        check_whole("max_tokens", params.max_tokens, low=1)
        check_suffix_len(tokenizer.least_tokens(suffix))
        suffix_ids = tokenizer.encode(suffix, add_special_tokens=False)
        check_suffix_ids(suffix_ids)
        *_, gap = fit_prompt(
            prompt.token_ids, suffix_ids, options, facts, param="prompt", is_default=False
        )
        assert gap is not None, "a suffix with tokens, and no gap"
        return gap


def packed_ids(token_ids: Sequence[int]) -> bytes:
    """A prompt as it goes to the engine; raises InvalidRequest for what is no token id."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except (struct.error, TypeError) as failure:
        raise InvalidRequest(
            "prompt token ids must be integers from 0 to 4294967295", param="prompt_token_ids"
        ) from failure


def read_bad_words(params: SamplingParams, vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    """Bad words as tokens; raises InvalidRequest where there is no tokenizer."""
    if not params.bad_words:
        return []
    if not isinstance(vocabulary, TextTokenizer):
        raise InvalidRequest(
            "bad_words are texts and need a tokenizer: use an LLM without skip_tokenizer_init",
            param="bad_words",
        )
    return bad_word_ids(params.bad_words, vocabulary)


def _ids(given: Any) -> list[Any]:
    return ids_of("prompt", given, _WORDING)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, whichever way one or many were given; raises InvalidRequest for neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = list(several("prompts", prompts, f"one or a list of them: {_WORDING}"))
    if listed and all(isinstance(item, Integral) for item in listed):  # numpy's too
        return [cast("Sequence[int]", listed)]
    return cast("list[Prompt]", listed)


def one_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Parameters of `count` prompts; raises InvalidRequest for a list of another length, and for
    what is none."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
        raise _no_params("sampling_params", params)
    for index, one in enumerate(params):
        if not (one is None or isinstance(one, SamplingParams)):
            raise _no_params(f"sampling_params[{index}]", one)
    if len(params) != count:
        raise InvalidRequest(
            f"{count} prompts but {len(params)} SamplingParams: give one, or one per prompt",
            param="sampling_params",
        )
    return [one or SamplingParams() for one in params]


def _no_params(name: str, value: object) -> InvalidRequest:
    """Offline, beams have a call of their own; the clients take them where these stand."""
    wording = "SamplingParams, a list of one per prompt, or None"
    if isinstance(value, BeamSearchParams):
        wording += "; LLM.beam_search takes BeamSearchParams"
    return wrong_kind(name, value, wording)


def with_suffixes(prefixes: Prompt | Sequence[Prompt], suffix: str | Sequence[str]) -> list[Prompt]:
    """Every prefix with the suffix that follows its gap; one suffix serves all of them.

    Raises InvalidRequest for an empty suffix, and for a list of another length.
    """
    listed = as_list(prefixes)
    is_one = isinstance(suffix, str) or not isinstance(suffix, Sequence)
    suffixes = [cast("str", suffix)] * len(listed) if is_one else list(suffix)
    if len(suffixes) != len(listed):
        raise InvalidRequest(
            f"{len(listed)} prefixes but {len(suffixes)} suffixes: give one, or one per prefix",
            param="suffix",
        )
    for text in suffixes:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(
                f"suffix is {text!r}; infill fills the gap in front of a text: give one, or use "
                "generate",
                param="suffix",
            )
    return [{"prompt": p, "suffix": s} for p, s in zip(listed, suffixes, strict=True)]


def as_heard(facts: CoreFacts) -> EngineFacts:
    """What a frontend would be told of this engine."""
    return EngineFacts(
        instance_id="",
        model_id=facts.model_id,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        max_logprobs=facts.max_logprobs,
        tokenizer_sha256="",
        default_method=facts.default_method,
        methods=facts.methods,
        block_length=facts.block_length,
        mask_token_id=facts.mask_token_id,
        eos_token_ids=facts.eos_token_ids,
    )
