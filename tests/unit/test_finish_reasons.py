"""What the end of a sequence means for its request, and for the engine that it was on."""

from __future__ import annotations

import pytest

from engine_service.core import messages as core
from engine_service.server.convert_out import _finish
from frontend.engine_convert import to_finish
from frontend.messages import Finish, FinishReason, Timings, Usage
from tidemill.runtime.errors import GenerationFailed, InternalError, InvalidRequest, ServiceError
from tidemill.v1 import engine_pb2 as pb

FAILURES: dict[FinishReason, type[ServiceError]] = {
    FinishReason.DEAD_END: InvalidRequest,
    FinishReason.ERROR: GenerationFailed,
}


@pytest.mark.parametrize("reason", FinishReason)
def test_an_end_without_an_answer_is_the_callers_fault_or_ours(reason: FinishReason) -> None:
    failure = Finish(reason, None, "no token is left", Usage(), Timings()).failure
    assert type(failure) is FAILURES.get(reason, type(None))
    if failure is not None:
        assert "no token is left" in failure.message
        assert isinstance(failure, InternalError) == (reason is FinishReason.ERROR)


@pytest.mark.parametrize("reason", set(core.FinishReason) - {core.FinishReason.STOP})
def test_reasons_cross_the_wire_in_words_that_older_frontends_know(
    reason: core.FinishReason,
) -> None:
    usage, timings = core.Usage(1, 0, 1, 1, 0, 0), core.Timings(1, 2, 3, 4)
    sent = _finish(core.Finish(reason, None, "why", usage, timings))
    assert sent.reason in pb.FinishReason.values()
    assert to_finish(sent).reason == FinishReason(reason)
    assert sent.dead_end == (reason is core.FinishReason.DEAD_END)
    assert not sent.dead_end or sent.reason == pb.FINISH_REASON_ERROR
