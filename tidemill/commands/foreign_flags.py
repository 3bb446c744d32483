"""Flags of vLLM and SGLang that are none of ours: what to do instead, or that there is no such
thing here. Those that mean the same as one of ours are rewritten (`spellings`).
"""

from collections.abc import Mapping
from types import MappingProxyType

_QUANTIZED = (
    "Tidemill serves no quantized weights and no quantized KV: take a checkpoint in float32, "
    "bfloat16 or float16, and choose with --dtype"
)
_ADAPTERS = "Tidemill serves no LoRA adapters: merge the adapter into its checkpoint first"
_SPECULATION = "Tidemill has no speculative decoding"
_OFFLOAD = "Tidemill moves neither weights nor KV to host memory; see --memory-fraction"
_GRAPHS = "Tidemill chooses itself what it captures in CUDA graphs; --enforce-eager does without"
_COMPILER = "Tidemill does not use torch.compile"
_CHUNKS = "Tidemill computes long prompts in pieces by itself: --token-budget is the most of a step"
_KINDS = "Tidemill finds out from the checkpoint what a model serves"
_MEDIA = "Tidemill serves text alone"
_MOVES = "an engine whose KV is moved has a --role (prefill or decode) and a --kv-connector"
_ORDER = "Tidemill always goes by priority, and serves keys in turn among equals"
_GRAMMARS = "Tidemill always holds answers to grammars with llguidance"
_CODE = "Tidemill never runs code that comes with a model"
_OVERRIDES = "what to read over config.json is one JSON object, merged key by key: --hf-overrides"
_LINES = "Tidemill writes one line per request: see --log-level and --log-prompts"

_TOLD: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        _QUANTIZED: (
            "--quantization", "-q", "--kv-cache-dtype", "--quantization-param-path",
            "--calculate-kv-scales",
        ),
        _ADAPTERS: (
            "--enable-lora", "--lora-modules", "--lora-paths", "--max-loras", "--max-lora-rank",
            "--max-cpu-loras", "--max-loras-per-batch", "--lora-dtype", "--fully-sharded-loras",
        ),
        _SPECULATION: (
            "--speculative-config", "--speculative-model", "--num-speculative-tokens",
            "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps",
            "--speculative-eagle-topk", "--speculative-num-draft-tokens",
        ),
        _OFFLOAD: ("--swap-space", "--cpu-offload-gb", "--enable-hierarchical-cache"),
        _GRAPHS: ("--max-seq-len-to-capture", "--cuda-graph-max-bs", "--cuda-graph-bs"),
        _COMPILER: ("--compilation-config", "-O", "--enable-torch-compile"),
        _CHUNKS: ("--enable-chunked-prefill", "--chunked-prefill-size", "--max-prefill-tokens"),
        _KINDS: ("--task", "--is-embedding", "--runner"),
        "tokenizers are always the fast ones": ("--tokenizer-mode",),
        _MEDIA: ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--enable-multimodal"),
        _MOVES: ("--kv-transfer-config", "--disaggregation-mode"),
        _ORDER: (
            "--scheduling-policy", "--schedule-policy", "--enable-priority-scheduling",
            "--schedule-conservativeness",
        ),
        _GRAMMARS: ("--guided-decoding-backend", "--grammar-backend"),
        _CODE: ("--trust-remote-code",),
        _OVERRIDES: (
            "--rope-scaling", "--rope-theta", "--json-model-override-args",
        ),
        _LINES: (
            "--disable-log-requests", "--enable-log-requests", "--log-requests", "--max-log-len",
            "--uvicorn-log-level",
        ),
        "tools may always be sent; how calls are written is --tool-call-parser": (
            "--enable-auto-tool-choice",
        ),
        "the origins of --cors-origins stand with commas between": ("--allowed-origins",),
        "the methods of --cors-methods stand with commas between": ("--allowed-methods",),
        "the headers of --cors-headers stand with commas between": ("--allowed-headers",),
        "clients must show a certificate with --tls-client-ca": (
            "--ssl-ca-certs", "--ssl-cert-reqs",
        ),
        "ranks of a Ray cluster are --executor ray; of this host they need no flag": (
            "--distributed-executor-backend",
        ),
        "models of the hub are kept where the variable HF_HOME says": ("--download-dir",),
        "the tokens that KV has room for are --num-pages times --page-size": (
            "--max-total-tokens",
        ),
        "metrics are always at /metrics": ("--enable-metrics",),
        "an engine that stands still for --hang-timeout-s is ended": ("--watchdog-timeout",),
        "defaults of the checkpoint are taken, or none with --generation-config none": (
            "--override-generation-config",
        ),
        "with --expert-parallel all ranks share the experts": ("--ep-size", "--ep"),
    }
)  # fmt: skip

_TOLD_OF_BENCHES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--rate of bench serve is requests per second": ("--request-rate",),
        "--concurrency of bench serve is requests open at a time": ("--max-concurrency",),
        "of a burstiness B --arrival-cv of bench serve is 1 / sqrt(B)": ("--burstiness",),
        "bench serve counts what keeps --slo-ttft-ms, --slo-tpot-ms and --slo-e2e-ms": (
            "--goodput",
        ),
        "figures go to --json FILE": ("--save-result", "--result-filename", "--output-json"),
        "bench serve lasts for --seconds, and bench throughput takes --requests": (
            "--num-prompts",
        ),
        "prompts have --input-len and --output-len tokens, or come from --trace-file": (
            "--dataset-name", "--dataset-path", "--random-input-len", "--random-output-len",
        ),
    }
)  # fmt: skip

ADVICE: Mapping[str, str] = MappingProxyType(
    {flag: text for text, flags in _TOLD.items() for flag in flags}
)
"""By flag."""
BENCH_ADVICE: Mapping[str, str] = MappingProxyType(
    {**ADVICE, **{flag: text for text, flags in _TOLD_OF_BENCHES.items() for flag in flags}}
)
"""What benchmarks say of flags of vLLM's."""
