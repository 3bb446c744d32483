"""Lower bounds on the time of a request set: no engine in 16 bit can be faster on that device, if
prompts and decoding take turns.

Every forward pass costs the larger of its bytes at copy bandwidth and its operations at the matrix
rate (the roofline model, Williams et al. 2009). Prompts run at the full matrix rate with the
weights read once; all live requests decode together and read weights and live KV once a step.
Several GPUs divide the bound, as if communication cost nothing. It does not know engines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from tidemill.bench.sets import RequestSet

_ITEM_BYTES = 2
_DENSE = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
"""Architectures that are a plain dense decoder and compute one token a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What a device can do: copied bytes (read and written) and bf16 operations, per second."""

    bytes_per_s: float
    flop_per_s: float
    source: str
    """stated: measured once on such a card; measured: on this device, just now."""


_STATED = {
    "NVIDIA H200": Ceilings(bytes_per_s=4.27e12, flop_per_s=803e12, source="stated: NVIDIA H200"),
}
"""By device name: copies between buffers of the card, and bf16 products of 8,192^3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class _Work:
    """Sizes of one forward pass, from config.json."""

    body: int
    """Parameters of all layers' matrices."""
    head: int
    """Parameters of the output projection."""
    kv_bytes: int
    """KV of one token in all layers."""
    score_flop: int
    """Scores and weighted values of one query against one key, in all layers."""


def read_work(config: Mapping[str, Any]) -> _Work | None:
    """None for an architecture whose cost this model does not describe, and for layers that see no
    more than a window: those could be faster."""
    architecture = config.get("architectures", [""])[0]
    # Qwen's configs name a window that is off unless they say otherwise.
    is_on = config.get("use_sliding_window", architecture == "MistralForCausalLM")
    if architecture not in _DENSE or (is_on and config.get("sliding_window") is not None):
        return None
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    layers = config["num_hidden_layers"]
    mixing = 2 * (heads + kv_heads) * head_dim
    return _Work(
        body=layers * hidden * (mixing + 3 * config["intermediate_size"]),
        head=config["vocab_size"] * hidden,
        kv_bytes=2 * layers * kv_heads * head_dim * _ITEM_BYTES,
        score_flop=4 * layers * heads * head_dim,
    )


def bound(
    config: Mapping[str, Any], requests: RequestSet, ceilings: Ceilings | None, gpus: int = 1
) -> Bound | None:
    """Least seconds for the set; None without ceilings, or for an architecture we cannot count."""
    work = read_work(config)
    if work is None or ceilings is None:
        return None
    lens = [len(prompt) for prompt in requests.prompts]
    weight_bytes = _ITEM_BYTES * (work.body + work.head)
    flop = sum(2 * work.body * n + work.score_flop * n * n / 2 + 2 * work.head for n in lens)
    prefill_s = max(flop / ceilings.flop_per_s, weight_bytes / ceilings.bytes_per_s)
    decode_s = 0.0
    for step, (rows, prompt_tokens) in enumerate(_decoding(lens, requests.output_lens), start=1):
        context = prompt_tokens + rows * step
        moved = weight_bytes + work.kv_bytes * context
        flop = 2 * (work.body + work.head) * rows + work.score_flop * context
        decode_s += max(moved / ceilings.bytes_per_s, flop / ceilings.flop_per_s)
    return Bound(prefill_s=prefill_s / gpus, decode_s=decode_s / gpus)


def _decoding(prompt_lens: list[int], output_lens: list[int]) -> list[tuple[int, int]]:
    """(rows, prompt tokens of these rows) of every step after the first token, which is prefill's:
    row i decodes in steps 1 .. output_lens[i] - 1."""
    ends = [(0, 0)] * max(output_lens)
    for prompt_len, output_len in zip(prompt_lens, output_lens, strict=True):
        rows, tokens = ends[output_len - 1]
        ends[output_len - 1] = (rows + 1, tokens + prompt_len)
    later = accumulate(reversed(ends), lambda a, b: (a[0] + b[0], a[1] + b[1]))
    return list(later)[-2::-1]


def ceilings_of(device: str) -> Ceilings | None:
    """The stated ceilings of a known card, measured ones of another, None for a CPU."""
    import torch

    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    return _STATED.get(name) or _measure(torch.device(device))


def _measure(device: Any) -> Ceilings:
    """About a second: the fastest of several copies of 1 GiB and of several products."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in "ab")
    out = torch.empty_like(a)
    copy_s = _fastest(lambda: target.copy_(source), device)
    product_s = _fastest(lambda: torch.mm(a, b, out=out), device)
    return Ceilings(
        bytes_per_s=2 * source.numel() / copy_s, flop_per_s=2 * 8192**3 / product_s,
        source="measured",
    )  # fmt: skip


def _fastest(run: Any, device: Any, repeats: int = 20) -> float:
    import torch

    run()
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def as_figures(found: Bound | None, seconds: float) -> dict[str, float | None]:
    """The bound beside a measured time; `bound_ratio` is the share of the bound's rate reached."""
    if found is None:
        return {"bound_s": None, "prefill_bound_s": None, "decode_bound_s": None,
                "bound_ratio": None}  # fmt: skip
    return {
        "bound_s": round(found.total_s, 4),
        "prefill_bound_s": round(found.prefill_s, 4),
        "decode_bound_s": round(found.decode_s, 4),
        "bound_ratio": round(found.total_s / seconds, 4),
    }


def ceilings_as_figures(ceilings: Ceilings | None) -> dict[str, Any] | None:
    """For the JSON file."""
    return None if ceilings is None else asdict(ceilings)
