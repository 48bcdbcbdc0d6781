"""JSON and server-sent events on the ASGI edge: framing, stalled readers, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any

from starlette.types import Message, Receive, Send

from paceline.core.errors import ErrorKind, PacelineError, invalid
from paceline.wire.status import error_body, http_status

DONE = b"data: [DONE]\n\n"
MAX_INTEGER_DIGITS = 40
THREAD_BYTES = 65_536
"""Bodies above this are decoded in a thread."""


def dumps(value: Any) -> bytes:
    """JSON as bytes; lone surrogates, which JSON can write and UTF-8 cannot, become escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def frame(value: Any) -> bytes:
    """One event. JSON has no raw line breaks, so one ``data:`` line holds it."""
    return b"data: " + dumps(value) + b"\n\n"


def error_headers(error: PacelineError) -> dict[str, str]:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.kind is ErrorKind.DEADLINE_EXCEEDED:
        headers["x-should-retry"] = "false"
    return headers


class Exchange:
    """One HTTP request and its response.

    Args:
        stall_timeout_s: longest time that one write may wait for the reader.
    """

    def __init__(self, receive: Receive, send: Send, stall_timeout_s: float) -> None:
        self.headers: dict[str, str] = {}
        self.started = False
        self._receive = receive
        self._send = send
        self._stall_timeout_s = stall_timeout_s

    async def body(self, declared_bytes: str | None, max_bytes: int) -> Any:
        """The JSON body.

        Raises:
            PacelineError: TOO_LARGE, or INVALID_ARGUMENT for what is not JSON.
            ConnectionError: the client left.
        """
        too_large = PacelineError(ErrorKind.TOO_LARGE, f"the body must have at most {max_bytes} bytes")
        if declared_bytes is not None and declared_bytes.isdigit() and int(declared_bytes) > max_bytes:
            raise too_large
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("client left")
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise too_large
            parts.append(part)
            if not message.get("more_body", False):
                break
        data = b"".join(parts)
        return await asyncio.to_thread(_decode, data) if size > THREAD_BYTES else _decode(data)

    async def watched(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs ``work`` until it is done or the client leaves, which cancels it; False if it left."""
        task = asyncio.create_task(work)
        watcher = asyncio.create_task(self._disconnected())
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            await task
            return True
        finally:
            task.cancel()
            watcher.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)

    async def json(self, value: Any, status: int = 200) -> None:
        content = dumps(value)
        await self._start(status, "application/json", len(content))
        await self._write({"type": "http.response.body", "body": content})

    async def error(self, error: PacelineError) -> None:
        """The error body, or after the headers an error frame that ends the stream."""
        if self.started:
            await self._write({"type": "http.response.body", "body": frame(error_body(error)) + DONE})
            return
        self.headers.update(error_headers(error))
        await self.json(error_body(error), http_status(error.kind))

    async def stream(self, frames: AsyncGenerator[bytes, None]) -> None:
        """Sends events; headers go with the first one, so that an earlier failure is an HTTP error."""
        async with contextlib.aclosing(frames):
            async for data in frames:
                if not self.started:
                    self.headers["cache-control"] = "no-cache"
                    await self._start(200, "text/event-stream; charset=utf-8", None)
                await self._write({"type": "http.response.body", "body": data, "more_body": True})
        await self._write({"type": "http.response.body", "body": DONE})

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, content_type: str, length: int | None) -> None:
        headers: Mapping[str, str] = {"content-type": content_type, **self.headers}
        if length is not None:
            headers = {**headers, "content-length": str(length)}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self.started = True
        await self._write({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, message: Message) -> None:
        # The server waits here while its buffer to a slow reader is full.
        async with asyncio.timeout(self._stall_timeout_s):
            await self._send(message)


def _check_text(body: Mapping[str, Any]) -> None:
    """JSON can escape half of a character; such a string is no text and cannot be tokenized."""
    for field, value in body.items():
        try:
            json.dumps([field, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise invalid(ascii(field)[1:-1], "holds a lone surrogate, which is not text") from None


def _decode(data: bytes) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def integer(digits: str) -> int:
        if len(digits) > MAX_INTEGER_DIGITS:
            raise ValueError(f"an integer has more than {MAX_INTEGER_DIGITS} digits")
        return int(digits)

    try:
        value = json.loads(data, parse_constant=refuse, parse_int=integer)
        if b"\\u" in data and isinstance(value, dict):
            _check_text(value)
        return value
    except RecursionError:
        raise PacelineError(ErrorKind.INVALID_ARGUMENT, "the body is nested too deeply") from None
    except ValueError as error:
        raise PacelineError(ErrorKind.INVALID_ARGUMENT, f"the body is not valid JSON: {error}") from None
