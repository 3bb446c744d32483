"""What an engine has found while loading, for whoever asks. Picklable plain values."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.core.handoff import KvLayout
from engine_service.core.params import PoolFacts, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What GetEngineInfo answers, found while loading."""

    model_id: str
    weight_version: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    max_rows: int
    max_queued_requests: int
    max_logprobs: int
    page_size: int
    num_pages: int
    prefix_caching: bool
    default_method: str
    methods: tuple[str, ...]
    default_params: dict[str, object]
    block_length: int
    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    tokenizer_dir: str
    """Folder with the tokenizer's files; empty when the checkpoint has none."""
    pooling: PoolFacts | None
    """None: there are no hidden states."""
    stage_seconds: dict[str, float]
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False
    role: str = "both"
    approximate_caches: tuple[str, ...] = ()
    """Of its methods."""
    kv_layout: KvLayout | None = None
    """Of engines that move pages; None: it is neither a prefill nor a decode engine."""
