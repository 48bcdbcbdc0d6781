"""One table of outcomes: error kind to HTTP status, OpenAI error type and gRPC code (design section 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from paceline.core.errors import ErrorKind, PacelineError

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "paceline"


@dataclass(frozen=True, slots=True)
class _Outcome:
    http: int
    type: str
    grpc: grpc.StatusCode


_BAD_REQUEST = "invalid_request_error"
_SERVER = "server_error"
_OUTCOMES: dict[ErrorKind, _Outcome] = {
    ErrorKind.INVALID_ARGUMENT: _Outcome(400, _BAD_REQUEST, grpc.StatusCode.INVALID_ARGUMENT),
    ErrorKind.CONTEXT_LENGTH_EXCEEDED: _Outcome(400, _BAD_REQUEST, grpc.StatusCode.INVALID_ARGUMENT),
    ErrorKind.UNAUTHENTICATED: _Outcome(401, "authentication_error", grpc.StatusCode.UNAUTHENTICATED),
    ErrorKind.PERMISSION_DENIED: _Outcome(403, "permission_error", grpc.StatusCode.PERMISSION_DENIED),
    ErrorKind.NOT_FOUND: _Outcome(404, "not_found_error", grpc.StatusCode.NOT_FOUND),
    ErrorKind.MODEL_NOT_FOUND: _Outcome(404, "not_found_error", grpc.StatusCode.NOT_FOUND),
    ErrorKind.ALREADY_EXISTS: _Outcome(409, _BAD_REQUEST, grpc.StatusCode.ALREADY_EXISTS),
    ErrorKind.TOO_LARGE: _Outcome(413, _BAD_REQUEST, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ErrorKind.OVERLOADED: _Outcome(429, "rate_limit_error", grpc.StatusCode.RESOURCE_EXHAUSTED),
    ErrorKind.UNAVAILABLE: _Outcome(503, _SERVER, grpc.StatusCode.UNAVAILABLE),
    ErrorKind.DEADLINE_EXCEEDED: _Outcome(504, _SERVER, grpc.StatusCode.DEADLINE_EXCEEDED),
    ErrorKind.CANCELLED: _Outcome(499, _BAD_REQUEST, grpc.StatusCode.CANCELLED),
    ErrorKind.FAILED_PRECONDITION: _Outcome(400, _BAD_REQUEST, grpc.StatusCode.FAILED_PRECONDITION),
    ErrorKind.INTERNAL: _Outcome(500, _SERVER, grpc.StatusCode.INTERNAL),
}
_KIND_OF_CODE: dict[grpc.StatusCode, ErrorKind] = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED: ErrorKind.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: ErrorKind.PERMISSION_DENIED,
    grpc.StatusCode.NOT_FOUND: ErrorKind.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: ErrorKind.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind.OVERLOADED,
    grpc.StatusCode.UNAVAILABLE: ErrorKind.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: ErrorKind.CANCELLED,
    grpc.StatusCode.FAILED_PRECONDITION: ErrorKind.FAILED_PRECONDITION,
}


def http_status(kind: ErrorKind) -> int:
    return _OUTCOMES[kind].http


def error_type(kind: ErrorKind) -> str:
    """The ``type`` of OpenAI error bodies."""
    return _OUTCOMES[kind].type


def grpc_code(kind: ErrorKind) -> grpc.StatusCode:
    return _OUTCOMES[kind].grpc


def error_body(error: PacelineError) -> dict[str, dict[str, str | None]]:
    """OpenAI's error body; ``code`` is a string."""
    return {
        "error": {
            "message": error.message,
            "type": error_type(error.kind),
            "param": error.field,
            "code": error.kind.value,
        }
    }


def to_status(error: PacelineError) -> status_pb2.Status:
    """``google.rpc.Status`` with ErrorInfo, and BadRequest or RetryInfo where they apply."""
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.kind.name, domain=DOMAIN)]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        message = any_pb2.Any()
        message.Pack(detail)
        packed.append(message)
    code = code_pb2.Code.Value(grpc_code(error.kind).name)
    return status_pb2.Status(code=code, message=error.message, details=packed)


def trailing_metadata(error: PacelineError) -> tuple[tuple[str, bytes], ...]:
    return ((DETAILS_KEY, to_status(error).SerializeToString()),)


def from_rpc_error(error: grpc.aio.AioRpcError) -> PacelineError:
    """The peer's error, with kind, field and retry delay where it sent details."""
    kind = _KIND_OF_CODE.get(error.code(), ErrorKind.INTERNAL)
    field: str | None = None
    retry_after_s: float | None = None
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.ErrorInfo()
            bad_request = error_details_pb2.BadRequest()
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(info) and info.domain == DOMAIN and info.reason in ErrorKind.__members__:
                kind = ErrorKind[info.reason]
            elif detail.Unpack(bad_request) and bad_request.field_violations:
                field = bad_request.field_violations[0].field
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return PacelineError(kind, error.details() or kind.value, field=field, retry_after_s=retry_after_s)
