"""Server-sent events of the OpenAI API, as dictionaries."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx


class ApiError(Exception):
    """The server refused the request or the stream ended in an error frame."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


async def chunks(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """POSTs ``body`` and yields every chunk up to ``[DONE]``.

    Raises:
        ApiError: an HTTP error, an error frame, or a stream that ended without ``[DONE]``.
        httpx.HTTPError: no answer.
    """
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            raise error_of(response.status_code, await response.aread())
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            chunk: dict[str, Any] = json.loads(data)
            if "error" in chunk:
                raise _api_error(chunk, "stream_error")
            yield chunk
    raise ApiError("stream_cut", "the stream ended without [DONE]")


def error_of(status: int, content: bytes) -> ApiError:
    """The error that an HTTP answer carries."""
    try:
        body = json.loads(content)
    except ValueError:
        body = {}
    return _api_error(body if isinstance(body, dict) else {}, f"http_{status}")


def _api_error(body: Mapping[str, Any], code: str) -> ApiError:
    error = body.get("error")
    if not isinstance(error, dict):
        return ApiError(code, "no message")
    return ApiError(str(error.get("code") or code), str(error.get("message") or "no message"))
