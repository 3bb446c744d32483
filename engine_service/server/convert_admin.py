"""AdminService: requests of the contract (protobuf) as what is asked of a core, and answers."""

from __future__ import annotations

from engine_service.core.control import PauseMode, StartProfile
from tidemill.runtime.errors import InvalidRequest
from tidemill.v1 import engine_pb2 as pb

_MOST_S = 1e9


def pause_mode(request: pb.PauseRequest) -> PauseMode:
    """Raises InvalidRequest where none is named: aborting is not to be had by omission."""
    if int(request.mode) not in tuple(map(int, PauseMode)):
        raise InvalidRequest(
            "mode must be PAUSE_MODE_ABORT, PAUSE_MODE_WAIT or PAUSE_MODE_KEEP", param="mode"
        )
    return PauseMode(request.mode)


def start_profile(request: pb.StartProfileRequest) -> StartProfile:
    if not request.directory:
        raise InvalidRequest(
            "name the directory on the engine's host that the trace is written to",
            param="directory",
        )
    return StartProfile(request.directory)


def drain_limit_s(request: pb.DrainRequest, default_s: float) -> float:
    """At most what frontends can be told of; nobody waits longer."""
    if not request.HasField("timeout_ms"):
        return default_s
    return min(request.timeout_ms / 1000, _MOST_S)


def flushed(num_pages: int) -> pb.FlushCacheResponse:
    return pb.FlushCacheResponse(pages_flushed=num_pages)


def profile_files(files: list[str]) -> pb.StopProfileResponse:
    return pb.StopProfileResponse(files=files)


def drained() -> pb.DrainResponse:
    return pb.DrainResponse()


def paused() -> pb.PauseResponse:
    return pb.PauseResponse()


def resumed() -> pb.ResumeResponse:
    return pb.ResumeResponse()


def traced() -> pb.SetTraceLevelResponse:
    return pb.SetTraceLevelResponse()


def profile_started() -> pb.StartProfileResponse:
    return pb.StartProfileResponse()
