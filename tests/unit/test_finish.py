"""What the end of a sequence means for its request, and for the engine that it was on."""

from __future__ import annotations

import pytest

from frontend.messages import Finish, FinishReason, Timings, Usage
from tidemill.runtime.errors import GenerationFailed, InternalError, InvalidRequest, ServiceError

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
