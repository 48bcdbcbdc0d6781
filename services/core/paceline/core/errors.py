"""Domain errors. The wire layer maps each kind to one HTTP and one gRPC code (docs/api.md)."""

from __future__ import annotations

from enum import StrEnum


class ErrorKind(StrEnum):
    """What went wrong, from the caller's point of view. The value is the ``code`` of HTTP error bodies."""

    INVALID_ARGUMENT = "invalid_argument"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNAUTHENTICATED = "invalid_api_key"
    PERMISSION_DENIED = "permission_denied"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    ALREADY_EXISTS = "already_exists"
    TOO_LARGE = "request_too_large"
    OVERLOADED = "queue_full"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    FAILED_PRECONDITION = "failed_precondition"
    INTERNAL = "internal_error"


class PacelineError(Exception):
    """An error with a defined outcome.

    Args:
        kind: decides the HTTP and gRPC code.
        message: for the caller; names the field and the limit where there is one.
        field: dotted name of the offending request field.
        retry_after_s: when the caller may try again; sent as ``Retry-After`` and ``RetryInfo``.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


def invalid(field: str, message: str) -> PacelineError:
    """The error for a request field out of its limits; ``message`` states the limit."""
    return PacelineError(ErrorKind.INVALID_ARGUMENT, f"{field}: {message}", field=field)


class ConfigError(Exception):
    """A wrong value or unknown key in the configuration; the message names the key."""
