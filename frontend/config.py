"""What an operator may choose for a frontend. Frozen; flags are generated from this class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """Flags of the frontend."""

    engine: str = "127.0.0.1:50061"
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
    """Folder of the tokenizer; default: fetched from the engine."""
    served_model_name: str | None = None
    """Name that clients use in `model`; default: the engine's model id."""
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
    """Largest gRPC message."""
    max_n: int = 16
    """Most choices per request."""
    request_timeout_s: float | None = None
    """Deadline of requests that bring none."""
    connect_timeout_s: float = 60.0
    """How long to wait for the engine at start-up."""
    drain_timeout_s: float = 30.0
    """How long SIGTERM waits for running requests."""
    reflection: bool = False
    """Serve gRPC reflection."""
    otlp_endpoint: str | None = None
    """Collector for traces (OTLP over gRPC), for example http://127.0.0.1:4317."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""
