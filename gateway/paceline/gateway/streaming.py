"""Output of one API call, from one or several requests, as deltas and as events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from paceline.core.errors import PacelineError
from paceline.gateway.request import Delta
from paceline.gateway.responses import Format
from paceline.gateway.service import Session
from paceline.gateway.sse import frame


async def merged(session: Session) -> AsyncGenerator[tuple[int, int, Delta], None]:
    """Output of all requests of a call as it comes: prompt, choice index in the call, delta.

    Raises:
        PacelineError: one of them failed.
    """
    if len(session.requests) == 1:
        request = session.requests[0]
        while deltas := await request.deltas():
            for delta in deltas:
                yield 0, delta.choice, delta
        return
    queue: asyncio.Queue[tuple[int, list[Delta] | PacelineError]] = asyncio.Queue()

    async def follow(prompt: int) -> None:
        try:
            while deltas := await session.requests[prompt].deltas():
                queue.put_nowait((prompt, deltas))
            queue.put_nowait((prompt, []))
        except PacelineError as error:
            queue.put_nowait((prompt, error))

    followers = [asyncio.create_task(follow(i)) for i in range(len(session.requests))]
    try:
        open_requests = len(followers)
        while open_requests:
            prompt, news = await queue.get()
            if isinstance(news, PacelineError):
                raise news
            open_requests -= not news
            for delta in news:
                yield prompt, prompt * len(session.requests[0].choices) + delta.choice, delta
    finally:
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)


async def frames(session: Session, form: Format) -> AsyncGenerator[bytes, None]:
    """The events of a stream, ``[DONE]`` left out."""
    left = sum(len(request.choices) for request in session.requests)
    begun: set[int] = set()
    async with contextlib.aclosing(merged(session)) as output:
        async for prompt, index, delta in output:
            data = b""
            if index not in begun:
                begun.add(index)
                first = form.first(prompt, index)
                data = b"" if first is None else frame(first)
            left -= delta.finish is not None
            data += b"".join(frame(chunk) for chunk in form.pieces(index, delta, last=left == 0))
            if data:
                yield data
    usage = form.usage_chunk()
    if usage is not None:
        yield frame(usage)
