"""Names of OpenTelemetry's semantic conventions: every one that we write stands here.

GenAI names are those of v1.41, the last version that held them: none is stable, and they are being
renamed in a repository of their own. RPC and HTTP names are the new ones; who still reads the old
ones too says so as OpenTelemetry defines it: OTEL_SEMCONV_STABILITY_OPT_IN=rpc/dup,http/dup.
`gen_ai_latest_experimental`, `rpc` and `http` ask for what is written anyway.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"
OPT_IN = "OTEL_SEMCONV_STABILITY_OPT_IN"

OPERATION = "gen_ai.operation.name"
CHAT, COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_STOP = "gen_ai.request.stop_sequences"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_CHOICES = "gen_ai.request.choice.count"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH = "gen_ai.response.finish_reasons"
RESPONSE_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
ERROR_TYPE = "error.type"

RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
URL_PATH = "url.path"
URL_SCHEME = "url.scheme"

DURATION_S = tuple(0.01 * 2**k for k in range(14))
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
RPC_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Buckets of `gen_ai.server.request.duration`, `.time_to_first_token`, `.time_per_output_token`
and `rpc.server.call.duration`, as the conventions advise."""

Attributes = dict[str, str | int | float | bool | Sequence[str]]

_CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
    "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""gRPC's status codes by number."""


def status_name(code: int) -> str:
    """The name of a gRPC status code, as `rpc.response.status_code` holds it."""
    return _CODES[code]


def duplicated(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The areas, of rpc and http, whose old names are wanted beside the new ones."""
    asked = {word.strip() for word in environ.get(OPT_IN, "").split(",")}
    return frozenset(area for area in ("rpc", "http") if f"{area}/dup" in asked)


def with_old_names(attributes: Attributes, areas: frozenset[str]) -> Attributes:
    """The attributes, and what earlier conventions called them in `areas`."""
    found = dict(attributes)
    if "rpc" in areas and RPC_METHOD in attributes:
        service = str(attributes[RPC_METHOD]).rpartition("/")[0]
        found |= {"rpc.system": "grpc", "rpc.service": service}
        if RPC_STATUS in attributes:
            found["rpc.grpc.status_code"] = _CODES.index(str(attributes[RPC_STATUS]))
    if "http" in areas and HTTP_METHOD in attributes:
        found["http.method"] = attributes[HTTP_METHOD]
        found["http.target"] = attributes[URL_PATH]
        found["http.scheme"] = attributes[URL_SCHEME]
        if HTTP_STATUS in attributes:
            found["http.status_code"] = attributes[HTTP_STATUS]
    return found
