"""Embeddings, labels and scores offline: prompts that are pooled, and what comes of their ends.

It does not know the engine's loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engine_service.config import EngineConfig
from engine_service.core.facts import EngineFacts
from engine_service.core.messages import Finish, FinishReason, Submit
from engine_service.core.params import DecodingChoice, PoolChoice, SamplingParams
from engine_service.model_folder import CONFIG
from frontend.served import labels_of, likeliest, read_labels
from frontend.tokenizer import TextTokenizer
from tidemill.given import of_kind, several, wrong_kind
from tidemill.outputs import ClassificationOutput, EmbeddingOutput
from tidemill.prompts import packed_ids
from tidemill.runtime.errors import InternalError, InvalidRequest
from tidemill.vectors import Input, as_inputs, input_ids

Pair = tuple[str, str]


class PoolPrompt(NamedTuple):
    """A prompt and what is wanted of it."""

    token_ids: list[int]
    choice: PoolChoice

    def to_submit(self, key: int) -> Submit:
        """Raises InvalidRequest for what is no token id."""
        return Submit(
            key=key,
            request_id=f"offline-pool-{key}",
            prompt=packed_ids(self.token_ids),
            sampling=SamplingParams(),
            decoding=DecodingChoice(),
            pool=self.choice,
        )


class PoolReader:
    """Reads inputs for one engine; `keep` as in `TextTokenizer.encode_input`, -1: the context."""

    def __init__(
        self, tokenizer: TextTokenizer | None, facts: EngineFacts, keep: int | None
    ) -> None:
        keep = of_kind("LLM", "truncate_prompt_tokens", int | None, keep)
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
            return PoolPrompt(input_ids(given)[: self._keep], choice)
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


class PooledCalls(ABC):
    """What `LLM` gets of it: the calls that generate nothing."""

    config: EngineConfig
    facts: EngineFacts
    _tokenizer: TextTokenizer | None

    @abstractmethod
    def _pool(self, prompts: Sequence[PoolPrompt]) -> list[Finish]:
        """Runs them to their ends."""

    def embed(
        self,
        inputs: Input | Sequence[Input],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """A vector for every text or list of token ids, in their order.

        `pooling` is mean, last or cls, by default the checkpoint's way. `dimensions` keeps that
        many leading features, of vectors of length 1 unless `normalize` is False;
        `truncate_prompt_tokens` that many leading tokens, -1: what the context holds.
        """
        choice = PoolChoice(
            kind=of_kind("LLM", "pooling", str | None, pooling),
            normalize=of_kind("LLM", "normalize", bool | None, normalize),
            dimensions=of_kind("LLM", "dimensions", int | None, dimensions),
        )
        reader = PoolReader(self._tokenizer, self.facts, truncate_prompt_tokens)
        prompts = [reader.read(one, choice) for one in as_inputs(inputs)]
        return [
            EmbeddingOutput(
                prompt_token_ids=prompt.token_ids,
                embedding=_to_vector(finish),
                cached_tokens=finish.usage.cached_tokens,
            )
            for prompt, finish in zip(prompts, self._pool(prompts), strict=True)
        ]

    def classify(
        self, inputs: Input | Sequence[Input], *, truncate_prompt_tokens: int | None = None
    ) -> list[ClassificationOutput]:
        """The probability of every label, for every text or list of token ids, in their order.
        Models with a classification head only; others raise Unsupported.

        Labels are named as in the config.json beside the tokenizer's files: the checkpoint's,
        unless `tokenizer` is another folder. One without a name is LABEL_0, and so on.
        """
        choice = PoolChoice(task="classify")
        reader = PoolReader(self._tokenizer, self.facts, truncate_prompt_tokens)
        prompts = [reader.read(one, choice) for one in as_inputs(inputs)]
        told = [_to_vector(finish) for finish in self._pool(prompts)]
        folder = self.facts.tokenizer_dir
        labels = dict(read_labels(Path(folder) / CONFIG) if folder else {})
        labels |= labels_of(self.config.hf_overrides)
        return [
            ClassificationOutput(
                prompt_token_ids=prompt.token_ids, probs=probs, label=likeliest(probs, labels)
            )
            for prompt, probs in zip(prompts, told, strict=True)
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[float]:
        """How well the texts of every pair go together, the higher the better: what a cross-encoder
        says, of other models the cosine of the embeddings. One `text_1` serves all of `text_2`.
        """
        pairs = _as_pairs(text_1, text_2)
        reader = PoolReader(self._tokenizer, self.facts, truncate_prompt_tokens)
        if reader.reads_pairs:
            prompts = [reader.read_pair(*pair) for pair in pairs]
            return [_to_vector(finish)[0] for finish in self._pool(prompts)]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        outputs = self.embed(texts, normalize=True, truncate_prompt_tokens=truncate_prompt_tokens)
        vectors = {t: o.embedding for t, o in zip(texts, outputs, strict=True)}
        return [
            sum(a * b for a, b in zip(vectors[left], vectors[right], strict=True))
            for left, right in pairs
        ]


def _as_pairs(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[Pair]:
    """Pairs of texts; one first text serves all second ones. Raises InvalidRequest."""
    left, right = _texts("text_1", text_1), _texts("text_2", text_2)
    left = left * len(right) if len(left) == 1 else left
    if len(left) != len(right):
        raise InvalidRequest(
            f"text_1 has {len(left)} texts and text_2 {len(right)}; text_1 must have one, or as "
            "many as text_2",
            param="text_1",
        )
    return list(zip(left, right, strict=True))


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    if isinstance(given, str):
        return [given]
    listed = list(several(name, given, "a text, or a list of texts"))
    for place, one in enumerate(listed):
        if not isinstance(one, str):
            raise wrong_kind(f"{name}[{place}]", one, "a text")
    return listed


def _to_vector(finish: Finish) -> list[float]:
    """What a prompt was pooled into; raises InternalError where it ended early."""
    if finish.reason is not FinishReason.STOP:
        raise InternalError(f"a prompt ended early: {finish.reason.name.lower()} {finish.detail}")
    return array("f", finish.vector).tolist()
