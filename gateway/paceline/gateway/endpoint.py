"""POST endpoints as ASGI apps: request id, body, error body, and an end when the client leaves."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from paceline.core.errors import ErrorKind, PacelineError
from paceline.gateway.service import Gateway, request_id
from paceline.gateway.sse import Exchange, dumps, error_headers
from paceline.wire.status import error_body, error_type, http_status
from paceline.wire.telemetry import get_logger

_log = get_logger(__name__)
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


class Call:
    """One request to an endpoint: its headers, body and answer."""

    def __init__(self, headers: Headers, exchange: Exchange, call_id: str, body: object) -> None:
        self.headers = headers
        self.exchange = exchange
        self.id = call_id
        self.body = body

    @property
    def caller_timeout_s(self) -> float | None:
        """How long OpenAI's SDK waits before it gives up, which it tells in a header."""
        value = self.headers.get("x-stainless-read-timeout", "")
        return float(value) if _SECONDS.fullmatch(value) and float(value) > 0 else None


Handler = Callable[[Call], Awaitable[None]]


class Endpoint:
    """A POST handler as an ASGI app: request id, body, error body, and an end when the client leaves."""

    def __init__(self, gateway: Gateway, handler: Handler) -> None:
        self._gateway = gateway
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._gateway.settings.gateway
        headers = Headers(scope=scope)
        exchange = Exchange(receive, send, limits.stall_timeout_s)
        call_id = request_id("", "")
        exchange.headers["x-request-id"] = call_id
        try:
            try:
                call_id = request_id(headers.get("x-request-id", ""), "x-request-id")
                exchange.headers["x-request-id"] = call_id
                body = await exchange.body(headers.get("content-length"), limits.max_body_bytes)
                if not await exchange.watched(self._answer(Call(headers, exchange, call_id, body))):
                    _log.info("client_left", request=call_id, status=499)
            except PacelineError as error:
                await exchange.error(error)
        except ConnectionError:
            _log.info("client_left", request=call_id, status=499)
        except TimeoutError:
            # Returning with the response unfinished makes the server close the connection.
            _log.warning("reader_stalled", request=call_id, limit_s=limits.stall_timeout_s)

    async def _answer(self, call: Call) -> None:
        try:
            await self._handler(call)
        except PacelineError as error:
            await call.exchange.error(error)
        except (TimeoutError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - the API's boundary: an error body, never a cut
            _log.exception("request_failed", request=call.id)
            failure = PacelineError(ErrorKind.INTERNAL, f"internal error: {type(error).__name__}")
            await call.exchange.error(failure)


async def http_error(_: Request, error: Exception) -> Response:
    """Unknown paths and methods in the API's own form."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "error"
    code = "method_not_allowed" if status == 405 else ErrorKind.NOT_FOUND.value
    kind = "invalid_request_error" if status == 405 else error_type(ErrorKind.NOT_FOUND)
    body = {"error": {"message": detail, "type": kind, "param": None, "code": code}}
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(body, status_code=status, headers=headers)


async def paceline_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, PacelineError):
        raise error
    content = dumps(error_body(error))
    return Response(
        content, http_status(error.kind), headers=error_headers(error), media_type="application/json"
    )
