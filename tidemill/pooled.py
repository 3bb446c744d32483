"""What `tidemill.LLM` makes of inputs that are pooled: prompts, and vectors out of their ends.

It does not know the engine's loop.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine_service.core.facts import EngineFacts
from engine_service.core.messages import Finish, FinishReason, Submit
from engine_service.core.params import DecodingChoice, PoolChoice, SamplingParams
from frontend.tokenizer import TextTokenizer
from tidemill.outputs import EmbeddingOutput
from tidemill.runtime.errors import InternalError, InvalidRequest
from tidemill.vectors import Input

Pair = tuple[str, str]


class PoolPrompt(NamedTuple):
    """A prompt and what is wanted of it."""

    token_ids: list[int]
    choice: PoolChoice

    def to_submit(self, key: int) -> Submit:
        """Raises InvalidRequest for what is no token id."""
        try:
            packed = struct.pack(f"<{len(self.token_ids)}I", *self.token_ids)
        except (struct.error, TypeError) as failure:
            raise InvalidRequest(
                "prompt token ids must be integers from 0 to 4294967295", param="prompt_token_ids"
            ) from failure
        return Submit(
            key=key,
            request_id=f"offline-pool-{key}",
            prompt=packed,
            sampling=SamplingParams(),
            decoding=DecodingChoice(),
            pool=self.choice,
        )


class PoolReader:
    """Reads inputs for one engine; `keep` as in `TextTokenizer.encode_input`, -1: the context."""

    def __init__(
        self, tokenizer: TextTokenizer | None, facts: EngineFacts, keep: int | None
    ) -> None:
        if keep is not None and keep < 1 and keep != -1:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {keep}; it must be at least 1, or -1 for what the "
                "context holds",
                param="truncate_prompt_tokens",
            )
        self._tokenizer = tokenizer
        self._keep = facts.max_model_len if keep == -1 else keep
        self.reads_pairs = facts.pooling is not None and facts.pooling.num_labels == 1
        """The model is a cross-encoder."""

    def read(self, given: Input, choice: PoolChoice) -> PoolPrompt:
        """Raises InvalidRequest."""
        if not isinstance(given, str):
            return PoolPrompt(list(given)[: self._keep], choice)
        token_ids, _ = self._need_tokenizer().encode_input(given, keep=self._keep)
        return PoolPrompt(token_ids, choice)

    def read_pair(self, left: str, right: str) -> PoolPrompt:
        """Both texts in one prompt, to be scored by the model's head."""
        tokenizer = self._need_tokenizer()
        token_ids, start = tokenizer.encode_input(left, right, keep=self._keep)
        return PoolPrompt(token_ids, PoolChoice(task="score", pair_start=start))

    def _need_tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise InvalidRequest(
                "this LLM was made with skip_tokenizer_init and reads no text: give token ids",
                param="input",
            )
        return self._tokenizer


def as_pairs(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[Pair]:
    """Pairs of texts; one first text serves all second ones. Raises InvalidRequest."""
    left = [text_1] if isinstance(text_1, str) else list(text_1)
    right = [text_2] if isinstance(text_2, str) else list(text_2)
    left = left * len(right) if len(left) == 1 else left
    if len(left) != len(right):
        raise InvalidRequest(
            f"text_1 has {len(left)} texts and text_2 {len(right)}; text_1 must have one, or as "
            "many as text_2",
            param="text_1",
        )
    return list(zip(left, right, strict=True))


def cosines(pairs: Sequence[Pair], vectors: Mapping[str, Sequence[float]]) -> list[float]:
    """Of pairs of texts, whose vectors have length 1."""
    return [
        sum(a * b for a, b in zip(vectors[left], vectors[right], strict=True))
        for left, right in pairs
    ]


def to_vector(finish: Finish) -> list[float]:
    """What a prompt was pooled into; raises InternalError where it ended early."""
    if finish.reason is not FinishReason.LENGTH:
        raise InternalError(f"a prompt ended early: {finish.reason.name.lower()} {finish.detail}")
    return array("f", finish.vector).tolist()


def to_output(prompt: PoolPrompt, finish: Finish) -> EmbeddingOutput:
    """What the caller gets for an input."""
    return EmbeddingOutput(
        prompt_token_ids=prompt.token_ids,
        embedding=to_vector(finish),
        cached_tokens=finish.usage.cached_tokens,
    )
