"""vLLM on the request sets of `tidemill bench throughput`, with figures in the same form.

    python -m benchmarks.peers.run_vllm OUT.json SHAPE SET[,SET ...] [--gpus N]

Its own defaults, except what the comparison fixes: random weights, bfloat16, no tokenizer, no
prefix caching. Run it from the root of the repository in an environment that holds vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tidemill.bench.sets import RequestSet, request_sets
from tidemill.bench.shapes import shape_folder

_MAX_MODEL_LEN = 20480
_MAX_ROWS = 512


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.run_vllm")
    parser.add_argument("out", metavar="OUT.json", type=Path)
    parser.add_argument("shape", metavar="SHAPE")
    parser.add_argument("sets", metavar="SET[,SET ...]", type=request_sets)
    parser.add_argument("--gpus", type=int, default=1, help="tensor parallelism")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs; the best counts")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--memory-fraction", type=float, default=0.85)
    said = parser.parse_args(argv)
    # Nothing may be fetched or reported from a machine that is being measured.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Its sampler kernels of FlashInfer are compiled at start-up, which needs a CUDA toolkit.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    with shape_folder(said.shape) as folder:
        figures = _measure_all(said, folder)
    said.out.parent.mkdir(parents=True, exist_ok=True)
    said.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _measure_all(said: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch
    from vllm import LLM

    start = time.perf_counter()
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=_MAX_ROWS,
        gpu_memory_utilization=said.memory_fraction,
        enable_prefix_caching=False,
        tensor_parallel_size=said.gpus,
        disable_log_stats=True,
    )
    start_s = time.perf_counter() - start
    print(f"started in {start_s:.1f} s", file=sys.stderr, flush=True)
    return {
        "benchmark": "throughput",
        "engine": f"vllm {metadata.version('vllm')}",
        "packages": {"torch": torch.__version__},
        "gpu": torch.cuda.get_device_name(),
        "shape": said.shape,
        "gpus": said.gpus,
        "dtype": "bfloat16",
        "temperature": said.temperature,
        "top_k": said.top_k,
        "top_p": said.top_p,
        "start_s": round(start_s, 2),
        "sets": [_measure(said, llm, requests) for requests in said.sets],
    }


def _measure(said: argparse.Namespace, llm: Any, requests: RequestSet) -> dict[str, Any]:
    seconds = []
    for repeat in range(1, said.repeats + 1):
        seconds.append(_time(llm, requests, said))
        line = f"{requests.name}: run {repeat}/{said.repeats} {seconds[-1]:.3f} s"
        print(line, file=sys.stderr, flush=True)
    best, tokens_in, tokens_out = min(seconds), requests.prompt_tokens, requests.output_tokens
    return {
        "set": requests.name,
        "requests": len(requests.prompts),
        "prompt_tokens": tokens_in,
        "output_tokens": tokens_out,
        "seconds": round(best, 4),
        "all_seconds": [round(one, 4) for one in seconds],
        "prompt_tokens_per_s": round(tokens_in / best, 1),
        "output_tokens_per_s": round(tokens_out / best, 1),
        "total_tokens_per_s": round((tokens_in + tokens_out) / best, 1),
    }


def _time(llm: Any, requests: RequestSet, said: argparse.Namespace) -> float:
    """Seconds of one run. Raises RuntimeError unless every request got all of its tokens."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=said.temperature,
            top_k=said.top_k,
            top_p=said.top_p,
            ignore_eos=True,
            max_tokens=length,
            detokenize=False,
        )
        for length in requests.output_lens
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in requests.prompts]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if lengths != requests.output_lens:
        wanted = requests.output_tokens
        raise RuntimeError(f"{requests.name}: {sum(lengths)} tokens instead of {wanted}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
