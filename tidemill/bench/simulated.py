"""An engine in a process of its own whose model takes time and computes nothing.

It does not know what is measured, nor how an engine is asked.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@contextmanager
def simulated_engine(
    step_ms: float, max_rows: int
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """(process, port) of one that has begun to start."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        words = {
            "model": folder,
            "executor": "simulated",
            "simulated-step-ms": step_ms,
            "max-rows": max_rows,
            "engine-port": port,
            "drain-timeout-s": 1,
            "log-level": "error",
        }
        flags = [f"--{name}={value}" for name, value in words.items()]
        process = subprocess.Popen([sys.executable, "-m", "engine_service", *flags])
        try:
            yield process, port
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
