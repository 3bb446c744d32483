"""What is refused of a config by itself, before anything is opened. It does not know the flags of
engines.
"""

from __future__ import annotations

from frontend.config import FrontendConfig
from frontend.gate import check_rates
from frontend.liveness import checked_silence
from frontend.model_names import read_names
from frontend.parsers.registry import output_format
from tidemill.telemetry.tracer import checked_ratio


def check(config: FrontendConfig) -> None:
    """Raises FailedPrecondition for a parser that nobody knows, InvalidRequest for any other value,
    naming the flag and the limit."""
    read_names(config.served_model_name, "")
    output_format(config.tool_call_parser, config.reasoning_parser, None)
    checked_silence(config.engine_silence_s)
    check_rates(config)
    checked_ratio(config.trace_sample_ratio)
