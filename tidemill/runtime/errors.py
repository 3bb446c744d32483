"""The errors that cross a border, and the one table that turns them into statuses.

    ServiceError
      InvalidRequest      the caller's values are wrong; do not retry
      Unauthenticated     the caller did not say who it is, or not truthfully
      NotFound            no such model, adapter or request
      Overloaded          a queue is full; retry elsewhere or later
      Unsupported         the model, method or build cannot do it; names what
      Unavailable         starting, draining, or the other side is gone
      DeadlineExceeded    the caller's time is up
      Cancelled           the caller went away
      FailedPrecondition  the two sides speak different protocols
      EngineDead          the engine process is lost
      InternalError       a bug of ours
        GenerationFailed  one request cannot go on, the engine can: a grammar's library fails

It does not know gRPC or HTTP libraries: codes are plain integers of google.rpc.Code.
"""

from typing import ClassVar


class ServiceError(Exception):
    """A failure with a status.

    `reason` is machine-readable (upper snake case), `param` names the field at fault,
    `retry_after_ms` is set where waiting helps, `facts` are short extra key-value pairs.
    """

    grpc_code: ClassVar[int] = 13
    http_status: ClassVar[int] = 500
    http_type: ClassVar[str] = "internal_error"
    default_reason: ClassVar[str] = "INTERNAL"
    retriable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        param: str | None = None,
        retry_after_ms: int | None = None,
        facts: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.param = param
        self.retry_after_ms = retry_after_ms
        self.facts = facts or {}


class InvalidRequest(ServiceError):
    grpc_code, http_status = 3, 400
    http_type, default_reason = "invalid_request_error", "INVALID_ARGUMENT"


class Unauthenticated(ServiceError):
    grpc_code, http_status = 16, 401
    http_type, default_reason = "invalid_request_error", "INVALID_API_KEY"


class NotFound(ServiceError):
    grpc_code, http_status = 5, 404
    http_type, default_reason = "not_found_error", "NOT_FOUND"


class Overloaded(ServiceError):
    grpc_code, http_status = 8, 429
    http_type, default_reason, retriable = "overloaded_error", "QUEUE_FULL", True


class Unsupported(ServiceError):
    grpc_code, http_status = 12, 400
    http_type, default_reason = "invalid_request_error", "UNSUPPORTED"


class Unavailable(ServiceError):
    grpc_code, http_status = 14, 503
    http_type, default_reason, retriable = "unavailable_error", "UNAVAILABLE", True


class DeadlineExceeded(ServiceError):
    grpc_code, http_status = 4, 504
    http_type, default_reason = "timeout_error", "DEADLINE_EXCEEDED"


class Cancelled(ServiceError):
    grpc_code, http_status = 1, 499
    http_type, default_reason = "cancelled", "CANCELLED"


class FailedPrecondition(ServiceError):
    grpc_code, http_status = 9, 400
    http_type, default_reason = "invalid_request_error", "FAILED_PRECONDITION"


class EngineDead(Unavailable):
    default_reason = "ENGINE_DEAD"


class InternalError(ServiceError):
    pass


class GenerationFailed(InternalError):
    default_reason = "GENERATION_FAILED"


_KINDS: tuple[type[ServiceError], ...] = (
    InvalidRequest, NotFound, Overloaded, Unsupported, Unavailable, DeadlineExceeded, Cancelled,
    FailedPrecondition, Unauthenticated,
)  # fmt: skip


def from_grpc_code(code: int) -> type[ServiceError]:
    """The error class that a status code of the other side stands for."""
    return next((kind for kind in _KINDS if kind.grpc_code == code), InternalError)
