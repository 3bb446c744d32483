"""Flags in the words of other servers, turned into ours. It does not know what the flags do."""

from collections.abc import Mapping
from types import MappingProxyType

SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "--block-size": "--page-size",
        "--context-length": "--max-model-len",
        "--disable-cuda-graph": "--enforce-eager",
        "--disable-radix-cache": "--no-prefix-caching",
        "--dp": "--data-parallel-size",
        "--dp-size": "--data-parallel-size",
        "--dist-init-addr": "--leader-address",
        "--enable-expert-parallel": "--expert-parallel",
        "--enable-prefix-caching": "--prefix-caching",
        "--gpu-memory-utilization": "--memory-fraction",
        "--master-addr": "--leader-address",
        "--max-num-batched-tokens": "--token-budget",
        "--max-num-queued-reqs": "--max-queued-requests",
        "--max-num-seqs": "--max-rows",
        "--max-running-requests": "--max-rows",
        "--mem-fraction-static": "--memory-fraction",
        "--model-path": "--model",
        "--no-enable-prefix-caching": "--no-prefix-caching",
        "--num-gpu-blocks-override": "--num-pages",
        "--otlp-traces-endpoint": "--otlp-endpoint",
        "--port": "--http-port",
        "--pp": "--pipeline-parallel-size",
        "--pp-size": "--pipeline-parallel-size",
        "--random-seed": "--seed",
        "--ssl-certfile": "--tls-cert",
        "--ssl-keyfile": "--tls-key",
        "--shutdown-timeout": "--drain-timeout-s",
        "--tokenizer-path": "--tokenizer",
        "--tp": "--tensor-parallel-size",
        "--tp-size": "--tensor-parallel-size",
        "-dp": "--data-parallel-size",
        "-pp": "--pipeline-parallel-size",
        "-tp": "--tensor-parallel-size",
    }
)
"""Only spellings that mean exactly the same as ours."""
