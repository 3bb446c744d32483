"""What is refused of a config by itself, before anything is opened. It does not know the flags of
engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from frontend.config import FrontendConfig
from frontend.gate import check_rates
from frontend.liveness import checked_silence
from frontend.model_names import read_names
from frontend.parsers.registry import output_format
from tidemill.ranges import (
    COUNT,
    MESSAGE_BYTES,
    PORT,
    SOME_TIME,
    TIME,
    Range,
    check_ranges,
)
from tidemill.security.addresses import Proxies
from tidemill.security.tls_flags import check_client_flags, check_server_flags
from tidemill.telemetry.tracer import checked_ratio

_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "http_port": PORT,
        "grpc_port": PORT,
        "max_body_bytes": Range(1, "one byte"),
        "max_message_bytes": MESSAGE_BYTES,
        "read_timeout_s": TIME._replace(why="any time"),
        "max_n": Range(1, "one choice"),
        "request_timeout_s": SOME_TIME,
        "connect_timeout_s": TIME,
        "drain_timeout_s": TIME,
        "drain_pause_s": TIME,
        "health_port": PORT,
        "log_prompts": COUNT,
    }
)


def check(config: FrontendConfig) -> None:
    """Raises FailedPrecondition for a parser that nobody knows, for proxies that are no addresses
    and for flags of TLS that do not go together, InvalidRequest for any other value, naming the
    flag and the limit."""
    check_ranges(config, _RANGES)
    read_names(config.served_model_name, "")
    output_format(config.tool_call_parser, config.reasoning_parser, None)
    checked_silence(config.engine_silence_s)
    check_rates(config)
    check_server_flags(config)
    check_client_flags(
        config.engine_tls_ca, config.engine_tls_cert, config.engine_tls_key, config.engine_tls_name
    )
    Proxies(config.trusted_proxies)
    checked_ratio(config.trace_sample_ratio)
