"""What an operator may choose for an engine. Frozen after `resolve`; nobody edits it later.

The string under a field is its help text: flags, environment variables (`TIDEMILL_<FIELD>`) and
docs/configuration.md are generated from this class. It does not know torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Flags of the engine service."""

    model: str = "demo"
    """Built-in model (demo, demo-block, demo-canvas), local folder, or hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    tokenizer: str | None = None
    """Folder of the tokenizer that GetTokenizer serves; default: the model's folder. Its
    config.json, if it has one, names a classifier's labels."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """Where weights come from; dummy needs only a config.json and draws random weights."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """What to read over config.json, as JSON, before anything else reads it: objects are merged key
    by key, other values are replaced, null takes one away. It is how a model is said to be of
    another class (architectures), to have another mask token (mask_token_id), block length
    (block_size) or shift of its logits (uses_shifted_prediction)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and KV; auto: float32 on CPU, the checkpoint's or float16 on GPU."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto (CUDA when there is one); several ranks, and engines of
    data_parallel_size, take the devices from there on."""
    tensor_parallel_size: int = 1
    """GPUs that share one model, each with a process of its own; on the CPU processes that share
    its cores. They are this machine's, unless `executor` or `nnodes` say otherwise."""
    pipeline_parallel_size: int = 1
    """Stages that the model's layers are split into, one behind the other, of tensor_parallel_size
    GPUs (or processes) each. As many steps run at once, of different requests."""
    expert_parallel: bool = False
    """Each of the tensor_parallel_size ranks holds some of a layer's experts whole, instead of a
    share of each: fewer and larger products, but ranks whose experts are asked for most hold up the
    others."""
    role: Literal["both", "prefill", "decode"] = "both"
    """What it does of a request. prefill: it computes prompts and hands their KV to others; decode:
    it generates, and fetches the KV of prompts from prefill engines that the frontend picks; both:
    everything, alone. prefill and decode need prefix_caching and a causal or block-causal
    model."""
    kv_connector: Literal["auto", "grpc", "shm"] = "auto"
    """How a decode engine gets KV: grpc, in messages; shm, in shared memory of one host, and not at
    all from others; auto: shm where both engines can, else grpc."""
    kv_transfer_timeout_s: float = 30.0
    """How long a decode engine waits for the KV of a prompt before it computes the rest itself, and
    a prefill engine for each word of a decode engine before it ends the transfer."""
    kv_tls_ca: str | None = None
    """PEM file of the CA of the prefill engines' certificates: a decode engine speaks TLS with them
    and shows its own certificate (tls_cert), if it has one."""
    kv_tls_name: str | None = None
    """Name in the prefill engines' certificates; default: the host of each one's address, which in
    Kubernetes is often the IP of a pod."""
    max_model_len: int | None = None
    """Longest prompt + output in tokens; default: the checkpoint's own limit."""
    page_size: int | None = None
    """Tokens per KV page; default 16 on CPU, 64 on CUDA, or what fits blocks of the model."""
    num_pages: int | None = None
    """KV pages; default: sized from free memory after a profiling pass."""
    memory_fraction: float = 0.9
    """Share of device memory that weights, activations and KV may take together."""
    cpu_kv_bytes: int = 1 << 30
    """Upper bound of the KV pool on CPU, in bytes."""
    max_rows: int | None = None
    """Requests that run at the same time; default 64 on CPU, 256 on CUDA."""
    token_budget: int | None = None
    """Query tokens per step; default 1024 on CPU, 8192 on CUDA, there two to four times as many for
    models of a hidden size below 1449, and at least a block for every row, or a whole canvas."""
    logit_budget: int | None = None
    """Rows of logits per step; default: max_rows times the largest decision of a method."""
    canvas_budget: int | None = None
    """Query tokens per step of full-canvas requests that are computed whole (the refreshes of their
    caches), so that those which only step are not held up; default half of token_budget."""
    prefix_caching: bool = True
    """Reuse the KV of equal prompt prefixes."""
    max_queued_requests: int = 1024
    """Waiting requests before new ones are refused with RESOURCE_EXHAUSTED."""
    max_queued_tokens: int = 4 << 20
    """Tokens of all waiting requests (about 40 bytes of memory each) before new ones are refused.
    An empty queue takes any request."""
    max_queue_delay_s: float = 30.0
    """New requests are refused when they would wait longer than this for a row, as the measured
    turnover of rows says; 0: any wait. It bounds the time to the first token under overload: set it
    to what your clients have patience for."""
    age_bound_s: float = 30.0
    """A request that waited this long goes before every priority; fairness keys still share."""
    max_logprobs: int = 20
    """Most alternatives a request may ask for per token."""
    default_method: str | None = None
    """Decoding method of requests that name none; default: the model's own."""
    default_params: dict[str, Any] = field(default_factory=dict)
    """Knobs of the default method, as JSON."""
    generation_config: Literal["auto", "none"] = "auto"
    """Take sampling defaults from the checkpoint's generation_config.json (auto) or not."""
    attention_backend: Literal["auto", "flash", "triton", "sdpa", "reference"] = "auto"
    """Attention library; auto takes the fastest that works: flash or triton on CUDA."""
    enforce_eager: bool = False
    """Launch every kernel by itself instead of replaying CUDA graphs."""
    seed: int = 0
    """Seed of dummy weights and of requests that bring none (0: a fresh one per request)."""
    executor: Literal["model", "torchrun", "lws", "ray", "simulated"] = "model"
    """Where the ranks run: model, on this machine, or on the `nnodes` that are started alike;
    torchrun, one in each process that it starts; lws, evenly in the pods of a LeaderWorkerSet; ray,
    the first in this process and an actor for each other one. simulated computes nothing: a fixed
    step time and deterministic tokens."""
    nnodes: int = 1
    """Hosts that the ranks of executor model are spread over evenly; the engine is started on each,
    with the same flags but `node_rank`, and the first one serves."""
    node_rank: int = 0
    """Which of `nnodes` this is."""
    leader_address: str | None = None
    """HOST or HOST:PORT (50065) of the first host, where the others come to; with torchrun and lws
    by default where the environment says."""
    group_token_file: str | None = None
    """File with the secret by which hosts of one engine know each other; the same on all."""
    simulated_step_ms: float = 5.0
    """Step time of the simulated executor."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    engine_port: int = 50061
    """Port of the engine's gRPC services; 0 takes a free one. With data_parallel_size it is the
    first engine's and each next one's is one higher, like all ports of engines."""
    vllm_facade: bool = False
    """Serve vllm.grpc.engine.VllmEngine too, by which gateways such as SMG drive an engine."""
    admin_port: int | None = None
    """Port of AdminService (flush, drain, pause, profile, trace level), for operators only;
    default: not served; 0 takes a free one. It listens on `host`, so keep the network away from
    it."""
    kv_events_zmq: str | None = None
    """ZeroMQ address where changes of the prefix index are published, as vLLM does it: bound when
    it has a wildcard (tcp://*:5557), else connected to. With data_parallel_size ports count up per
    engine, as with vLLM; here and in kv_events_replay: leave room between the two."""
    kv_events_replay: str | None = None
    """ZeroMQ address where readers of kv_events_zmq get what they missed (tcp://*:5558)."""
    kv_events_topic: str = ""
    """First frame of what is published; llm-d wants kv@<pod>@<model>."""
    tls_cert: str | None = None
    """PEM file of this server's certificate and its chain; TLS on all ports but --health-port,
    --metrics-port and KV events over ZeroMQ. Read again when it changes, like the next two."""
    tls_key: str | None = None
    """PEM file of the certificate's key."""
    tls_client_ca: str | None = None
    """PEM file of CAs; callers must show a certificate that one of them signed (mTLS)."""
    health_port: int | None = None
    """Plaintext port that serves grpc.health.v1 alone, for probes that speak no TLS; 0 takes a free
    one; default: none."""
    reflection: bool = False
    """Serve gRPC reflection."""
    max_message_bytes: int = 64 << 20
    """Largest gRPC message."""
    drain_timeout_s: float = 30.0
    """How long SIGTERM waits for running requests."""
    drain_pause_s: float = 0.0
    """How long SIGTERM still takes new requests, not ready any more, until everybody knows; in
    Kubernetes about 5."""
    heartbeat_timeout_s: float = 5.0
    """Not ready while the core has said nothing for this long; it says something every second,
    unless a step takes longer."""
    hang_timeout_s: float = 300.0
    """A core that has said nothing for this long is taken for dead, and the process ends with
    status 1 so that it is restarted; 0: never."""
    metrics_port: int | None = None
    """HTTP port of /metrics, and of /health, /health/live and /health/ready for probes; 0 takes a
    free one; default: none."""
    metrics_alias: Literal["none", "vllm"] = "none"
    """Write metrics under vLLM's names too, for dashboards and autoscalers that look for those."""
    otlp_endpoint: str | None = None
    """Collector for traces (OTLP over gRPC), for example http://127.0.0.1:4317."""
    trace_sample_ratio: float = 1.0
    """Share of the requests without a trace of their caller that are traced, 0 to 1; others are as
    their caller says."""
    trace_level: int = 1
    """0: no spans; 1: requests and their phases; 2: steps of traced requests too; 3: every block
    of diffusion requests, and every rank's part of these steps, too."""
    trace_step_every: int = 0
    """Trace every so manieth step, whoever is part of it; 0: none. From trace level 1 on."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""

    @property
    def num_ranks(self) -> int:
        """Processes that one model is spread over."""
        return max(1, self.tensor_parallel_size * self.pipeline_parallel_size)
