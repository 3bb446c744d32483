"""Which kernels a request would wait for: an engine on the CPU launches those of a GPU, none of
which runs; what counts is how each launch would be compiled.

    python -m tests.kernels.late_kernels MODEL [cold]

prints a line of JSON: how many ways of launching there were at start-up, and the kernels of which
requests brought another. `cold`: without the steps that run ahead of all requests.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any
from unittest.mock import patch

os.environ |= {"TRITON_INTERPRET": "0", "COMPILE_FOR": "90", "COMPILED": os.devnull}

import torch
from torch.nn import functional
from triton.runtime.jit import JITFunction

from engine_service.kernels import jit
from tests.kernels import compiling

_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.1},
    {"temperature": 0.7, "logprobs": 2},
    {"temperature": 0.7, "allowed_token_ids": [11, 12, 13]},
)
_PENALTIES: dict[str, Any] = {"temperature": 0.7, "presence_penalty": 0.5, "min_tokens": 2}
_PAGE, _LONGEST = 64, 256


class Launches:
    """Every way in which each kernel is launched: Triton compiles it once for each."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """In place of JITFunction.run."""
        options |= {"debug": False, "instrumentation_mode": ""}
        *_, binder = kernel.device_caches[0]
        _, special, chosen = binder(*args, **options)
        self.seen.add((kernel.fn.__name__, str((special, sorted(chosen.items())))))


def without_kernels() -> None:
    """Nothing writes what kernels would: memory is zeros, and the CPU's products are left out."""
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like  # type: ignore[assignment]
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign]
    functional.linear = lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight))
    torch.mm = lambda a, b, out=None: a.new_zeros(len(a), b.shape[1]) if out is None else out
    torch.Tensor.addmm_ = lambda total, *factors: total  # type: ignore[assignment]
    jit.runs_triton = lambda x: x.dtype is not torch.float64


def serve(model: str, launches: Launches, *, cold: bool) -> tuple[int, list[str]]:
    """(ways of launching at start-up, kernels that requests launch in others)."""
    from engine_service.attention import triton as attention
    from engine_service.attention.select import create_backend
    from engine_service.worker import worker
    from tidemill import LLM, SamplingParams

    attention._INTERPRETED_SMS = 132
    worker.open_backend = lambda _, shape, *rest, **named: (create_backend("triton", shape), "")
    if cold:
        worker.build_kernels = lambda *rest: None
    sizes = {"max_model_len": _LONGEST, "max_rows": 128, "token_budget": 1024}
    rng = random.Random(0)
    with LLM(model, dtype="bfloat16", page_size=_PAGE, skip_tokenizer_init=True, **sizes) as llm:
        at_start = set(launches.seen)
        kinds = [*_KINDS, _PENALTIES]
        for count, chosen in [*((1, [kind]) for kind in kinds), (6, kinds), (80, kinds)]:
            prompts = [rng.choices(range(10, 200), k=rng.randint(1, 150)) for _ in range(count)]
            params = [
                SamplingParams(max_tokens=rng.randint(1, 40), ignore_eos=True, **rng.choice(chosen))
                for _ in prompts
            ]
            llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    late = {kernel for kernel, _ in launches.seen - at_start}
    return len(at_start), sorted(late)


if __name__ == "__main__":
    without_kernels()
    launches = Launches()

    def run(kernel: Any, *args: Any, **named: Any) -> None:
        launches.run(kernel, *args, **named)

    with patch.object(JITFunction, "run", run):
        num_known, late = serve(sys.argv[1], launches, cold="cold" in sys.argv[2:])
    told = {"capability": compiling.CAPABILITY, "known": num_known, "late": late}
    print(json.dumps(told))
