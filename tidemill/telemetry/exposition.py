"""The page that Prometheus reads, and the names under which others look for the same numbers.

It does not know where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample

from tidemill.telemetry.families import PREFIX

Alias = Literal["none", "vllm"]
_VLLM = "vllm:"
_SAME = (
    "admission_rejections", "cache_config_info", "diffusion_num_canvas_positions",
    "diffusion_num_committed_tokens", "diffusion_num_denoising_steps",
    "e2e_request_latency_seconds", "generation_tokens", "inter_token_latency_seconds",
    "kv_cache_usage_perc", "num_preemptions", "num_requests_running", "num_requests_waiting",
    "prefix_cache_hits", "prefix_cache_queries", "prompt_tokens", "request_decode_time_seconds",
    "request_generation_tokens", "request_inference_time_seconds", "request_params_max_tokens",
    "request_params_n", "request_prefill_time_seconds", "request_prompt_tokens",
    "request_queue_time_seconds", "request_success", "request_time_per_output_token_seconds",
    "time_to_first_token_seconds",
)  # fmt: skip
_NAMES = {PREFIX + name: _VLLM + name for name in _SAME} | {
    PREFIX + "iteration_tokens": _VLLM + "iteration_tokens_total",
    PREFIX + "http_requests": "http_requests",
    PREFIX + "http_request_duration_seconds": "http_request_duration_seconds",
}
_LABELS = {"page_size": "block_size", "num_pages": "num_gpu_blocks"}
"""What our labels are called there."""
_ENGINE = {"engine": "0"}
"""There one process tells of several engines, by number; of ours each tells of itself."""


class Collects(Protocol):
    """A registry, as far as it is read."""

    def collect(self) -> Iterable[Metric]: ...


class _WithAliases:
    """A registry whose metrics show up under vLLM's names too, where those say the same."""

    def __init__(self, registry: Collects) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        twins = []
        for family in self._registry.collect():
            yield family
            if family.name in _NAMES:
                twins.append(_renamed(family, _NAMES[family.name]))
        yield from twins


def _renamed(family: Metric, name: str) -> Metric:
    twin = Metric(name, family.documentation, family.type)
    more = _ENGINE if name.startswith(_VLLM) else {}
    twin.samples = [
        Sample(
            name + sample.name.removeprefix(family.name),
            {_LABELS.get(label, label): value for label, value in sample.labels.items()} | more,
            *sample[2:],
        )
        for sample in family.samples
    ]
    return twin


def expose(registry: Collects, accept: str, alias: Alias) -> tuple[bytes, str]:
    """The page and its content type: OpenMetrics, with exemplars, for those who ask for it."""
    encode, content_type = choose_encoder(accept)
    source = _WithAliases(registry) if alias == "vllm" else registry
    return encode(source), content_type
