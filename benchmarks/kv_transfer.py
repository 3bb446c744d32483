"""Seconds that the KV of a prompt takes from one engine to another on this host.

    python -m benchmarks.kv_transfer --shape qwen3-8b --tokens 2048 --connector shm,grpc

Two engines as processes of their own, random weights. A prompt is computed and fetched once; then
the decode engine forgets it and asks again, so that what is told is a transfer alone: the time to
the first token with KV that the other engine finds in its cache, without the time with KV that is
here already. `--narrow`: layers, key-value heads and head size of the shape, and next to nothing
else, for machines without a GPU. Flags of both engines stand behind `--`; where they share a card,
`--num-pages` among them, as each would take what is free of it.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from tidemill.bench.context import context
from tidemill.bench.services import free_row
from tidemill.bench.shapes import read_shape
from tidemill.runtime.rpc import channel_options
from tidemill.v1 import engine_pb2 as pb
from tidemill.v1 import engine_pb2_grpc as rpc

_HOST = "127.0.0.1"
_START_S = 600
_NARROW = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "num_attention_heads": 8}


@contextmanager
def running(
    folder: str, role: str, ports: list[int], *flags: str
) -> Iterator[subprocess.Popen[bytes]]:
    """An engine with its ports for calls and for operators, until the end of the block."""
    words = ["engine", folder, "--load-format=dummy", "--dtype=bfloat16", f"--role={role}"]
    words += [f"--engine-port={ports[0]}", f"--admin-port={ports[1]}", "--metrics-port=0", *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "tidemill", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


class Engine:
    """One of the two, over gRPC."""

    def __init__(
        self, ports: list[int], process: subprocess.Popen[bytes], stack: ExitStack
    ) -> None:
        """Returns when it is ready; an engine that ends instead ends this."""
        self.address, admin = (f"{_HOST}:{port}" for port in ports)
        channel, operators = (
            stack.enter_context(grpc.insecure_channel(one, channel_options(64 << 20)))
            for one in (self.address, admin)
        )
        is_there = grpc.channel_ready_future(channel)
        for _ in range(_START_S):
            with suppress(grpc.FutureTimeoutError):
                is_there.result(1.0)
                break
            if process.poll() is not None:
                sys.exit(f"an engine ended with {process.returncode} as it started")
        self._engine = rpc.EngineServiceStub(channel)
        self._admin = rpc.AdminServiceStub(operators)
        for told in rpc.EngineInfoServiceStub(channel).WatchState(pb.WatchStateRequest()):
            if told.state == pb.ENGINE_STATE_READY:
                break

    def first_token_s(self, prompt: list[int], source: str = "") -> tuple[float, int]:
        """Seconds until it is there, and how many tokens of the prompt were cached."""
        spec = pb.GenerateSpec(
            prompt_token_ids=struct.pack(f"<{len(prompt)}I", *prompt),
            sampling=pb.SamplingParams(max_tokens=1),
        )
        if source:
            spec.kv_source.address = source
        began, cached = time.perf_counter(), -1
        for told in self._engine.Generate(pb.GenerateRequest(spec=spec)):
            if told.HasField("finish"):
                cached = told.finish.usage.cached_tokens
        return time.perf_counter() - began, cached

    def forget(self) -> None:
        """What the prefix index holds."""
        self._admin.FlushCache(pb.FlushCacheRequest())


def measure(folder: str, config: dict[str, Any], connector: str, asked: Any) -> dict[str, Any]:
    """Medians of a connector's transfers."""
    flags = [*asked.flags, f"--max-model-len={asked.tokens + 64}", "--max-rows=4"]
    flags.append(f"--kv-connector={connector}")
    draw = random.Random(1)
    prompt = [draw.randrange(config["vocab_size"] - 8) for _ in range(asked.tokens)]
    with ExitStack() as stack:
        ports = free_row(4)
        pairs = ports[:2], ports[2:]
        processes = [
            stack.enter_context(running(folder, role, own, *flags))
            for role, own in zip(("prefill", "decode"), pairs, strict=True)
        ]
        source, target = (
            Engine(own, process, stack) for own, process in zip(pairs, processes, strict=True)
        )
        target.first_token_s(prompt, source.address)
        target.forget()
        alone = target.first_token_s(prompt)[0]
        seconds, there = [], []
        for _ in range(asked.runs):
            target.forget()
            took, cached = target.first_token_s(prompt, source.address)
            assert cached > len(prompt) - 200, f"{cached} of {len(prompt)} tokens came"
            seconds.append(took)
            there.append(target.first_token_s(prompt)[0])
    sizes = (config[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    layers, heads, width = sizes
    mb = cached * 2 * layers * heads * width * 2 / 1e6
    fetched = median(seconds) - median(there)
    return {
        "connector": connector,
        "tokens": cached,
        "mb": round(mb, 1),
        "computed_s": round(alone, 4),
        "fetched_s": round(fetched, 4),
        "mb_per_s": round(mb / fetched, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--narrow", action="store_true")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--connector", default="shm,grpc")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("flags", nargs="*", help="behind --: of both engines")
    asked = parser.parse_args()
    config = read_shape(asked.shape) | (_NARROW if asked.narrow else {})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        found = [measure(folder, config, one, asked) for one in asked.connector.split(",")]
    for one in found:
        print(
            f"{one['connector']:5} {one['tokens']:6,} tokens {one['mb']:8,.1f} MB   computed in "
            f"{one['computed_s']:.3f} s, fetched in {one['fetched_s']:.3f}: {one['mb_per_s']:,.0f}"
            " MB/s"
        )
    if asked.json:
        told = {"shape": asked.shape, "narrow": asked.narrow, "transfers": found}
        Path(asked.json).write_text(json.dumps(context("kv_transfer") | told, indent=2))


if __name__ == "__main__":
    main()
