"""What an operator may choose for a frontend. Frozen; flags are generated from this class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidemill.runtime.options import Listed, Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """Flags of the frontend."""

    engine: Listed = "127.0.0.1:50061"
    """Engines that serve one model: HOST:PORT, several with commas between them, dns:///NAME:PORT
    (all of its addresses), or k8s:///NAMESPACE/SERVICE:PORT (EndpointSlices)."""
    routing: Literal["least_loaded", "prefix_affinity", "round_robin", "session_affinity"] = (
        "least_loaded"
    )
    """Which of several engines gets a request. prefix_affinity: one that has the beginning of the
    prompt in its cache; session_affinity: the same for equal x-session-id, prompt_cache_key or
    user. Both only as far as no engine gets much more to do than others."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    http_port: int = 8000
    """Port of the OpenAI-compatible HTTP interface; 0 takes a free one."""
    grpc_port: int = 50051
    """Port of TextService; 0 takes a free one."""
    tokenizer: str | None = None
    """Folder of the tokenizer; default: fetched from the engine. Its config.json, if it has one,
    names a classifier's labels."""
    served_model_name: Listed | None = None
    """Name that clients use in `model`, or several with commas between; answers bear the one that
    was asked for, metrics and logs the first. Default: the engine's model id."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the tokenizer's."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls, for example hermes or llama3_json; auto: as its chat
    template shows; none: tools are refused."""
    reasoning_parser: str = "auto"
    """How the model writes its reasoning, for example deepseek_r1 or qwen3; auto: as its chat
    template shows; none: reasoning is part of the text."""
    max_body_bytes: int = 4 << 20
    """Largest HTTP request body; larger ones are answered 413."""
    max_message_bytes: int = 64 << 20
    """Largest gRPC message of a client, and to an engine, whose own limit counts too where it is
    smaller; engines may send 64 MiB whatever this says."""
    read_timeout_s: float = 60.0
    """How long a client may take to send an HTTP request, from the first byte of its head to the
    last one of its body; then the connection is closed. 0: any time."""
    max_n: int = 16
    """Most choices per request."""
    request_timeout_s: float | None = None
    """Deadline of requests that bring none."""
    connect_timeout_s: float = 60.0
    """How long after the start the log warns that no engine is there; the frontend waits on, and
    answers 503 until one comes."""
    engine_silence_s: float = 10.0
    """An engine that says nothing for so long is taken for gone, and its streams end; after half of
    it, it gets no new requests. Engines speak twice a second, whatever they compute; at least 1.
    A host that acknowledges nothing is given up within 2 s, whatever stands here."""
    drain_timeout_s: float = 30.0
    """How long SIGTERM waits for running requests."""
    drain_pause_s: float = 0.0
    """How long SIGTERM still takes new requests, not ready any more, until everybody knows; in
    Kubernetes about 5."""
    metrics_alias: Literal["none", "vllm"] = "none"
    """Write metrics under vLLM's names too, for dashboards and autoscalers that look for those."""
    tls_cert: str | None = None
    """PEM file of this server's certificate and its chain; TLS on all ports but --health-port. Read
    again when it changes, like the next two."""
    tls_key: str | None = None
    """PEM file of the certificate's key."""
    tls_client_ca: str | None = None
    """PEM file of CAs; callers must show a certificate that one of them signed (mTLS)."""
    health_port: int | None = None
    """Plaintext port that serves grpc.health.v1 alone, for probes that speak no TLS; 0 takes a free
    one; default: none."""
    engine_tls_ca: str | None = None
    """PEM file of the CA of the engine's certificate; speaks TLS with the engine."""
    engine_tls_cert: str | None = None
    """PEM file of the certificate that this frontend shows the engine (mTLS)."""
    engine_tls_key: str | None = None
    """PEM file of that certificate's key."""
    engine_tls_name: str | None = None
    """Name in the engine's certificate; default: the host of --engine."""
    api_key: Secret | None = None
    """One key that clients must show; better given as the variable TIDEMILL_API_KEY, because other
    users of the machine see command lines."""
    api_keys_file: str | None = None
    """Lines of NAME sha256:HEX, as `tidemill key new NAME` makes them; clients must show the key of
    one. Read again when it changes."""
    public_metrics: bool = False
    """Serve /metrics without a key."""
    key_requests_per_minute: int = 0
    """Requests that each key name may send; up to a minute's worth at once; 0: any number."""
    key_tokens_per_minute: int = 0
    """Tokens of prompts and outputs that each key name may use; 0: any number."""
    ip_requests_per_minute: int = 0
    """Requests that each address may send, with a key or without; 0: any number."""
    ip_tokens_per_minute: int = 0
    """Tokens of prompts and outputs that each address may use; 0: any number."""
    trusted_proxies: Listed = ""
    """Addresses and networks, with commas between, whose x-forwarded-for names the client."""
    cors_origins: Listed = ""
    """Origins, with commas between, whose pages may call the HTTP interface from a browser; * for
    all of them."""
    cors_methods: Listed = "GET,POST,DELETE"
    """Methods, with commas between, that such pages may use."""
    cors_headers: Listed = "*"
    """Headers, with commas between, that such pages may send; * for all of them."""
    cors_credentials: bool = False
    """Let such pages send cookies and client certificates along."""
    log_prompts: int = 0
    """Characters of each prompt that are shown in its request's log line; 0: prompts stay out."""
    reflection: bool = False
    """Serve gRPC reflection."""
    otlp_endpoint: str | None = None
    """Collector for traces (OTLP over gRPC), for example http://127.0.0.1:4317."""
    trace_sample_ratio: float = 1.0
    """Share of the requests without a trace of their caller that are traced, 0 to 1; others are as
    their caller says."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""
