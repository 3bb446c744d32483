"""`bench tracing`: paired differences, and a collector that counts what arrives."""

from __future__ import annotations

import random

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tidemill.bench.collector import collector
from tidemill.bench.tracing import ALWAYS, OFF, SAMPLED, TracingOptions, run, summary, table
from tidemill.runtime.errors import InvalidRequest

ADDED = {OFF: 0.0, SAMPLED: 2.0, ALWAYS: 90.0}


def test_what_a_machine_does_beside_cancels_out_within_a_round(seed: int) -> None:
    """Rounds differ by ten times as much as tracing adds, which is found all the same."""
    rng = random.Random(seed)
    rounds = []
    for _ in range(12):
        busy = rng.uniform(500, 1500)
        rounds.append(
            {
                name: {"frontend 0": busy + added + rng.uniform(-1, 1), "rank 0": busy}
                for name, added in ADDED.items()
            }
        )
    found = summary(rounds)
    for name in (SAMPLED, ALWAYS):
        spread = found["added_us_per_request"][name]["frontend 0"]
        assert spread["median"] == pytest.approx(ADDED[name], abs=2.1)
        assert spread["min"] <= spread["q1"] <= spread["median"] <= spread["q3"] <= spread["max"]
        assert found["added_us_per_request"][name]["rank 0"]["median"] == 0
        both = found["added_us_per_request"][name]["both services"]
        assert both["median"] == pytest.approx(spread["median"], abs=0.2)
    off = [sum(one[OFF].values()) for one in rounds]
    always = [sum(one[ALWAYS].values()) for one in rounds]
    unpaired = [max(always) - min(off), min(always) - max(off)]
    assert unpaired[0] - unpaired[1] > 90, "without pairs the machine would hide it"
    results = found | {"spans_per_request": {SAMPLED: 0.06, ALWAYS: 6.0}}
    assert any("adds" in label and "us (+" in value for label, value in table(results))


def test_every_span_that_is_sent_is_counted() -> None:
    with collector() as one, collector() as other:
        provider = TracerProvider()
        exporter = OTLPSpanExporter(endpoint=one.endpoint, insecure=True)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        for number in range(5):
            provider.get_tracer("test").start_span(str(number)).end()
        provider.shutdown()
        assert (one.num_spans(), other.num_spans()) == (5, 0)


def test_too_few_rounds_have_no_spread() -> None:
    with pytest.raises(InvalidRequest, match="at least 2 works"):
        run(TracingOptions(rounds=1))
