"""Cancellations that libraries lose.

grpc.aio drops a cancellation that meets the end of a call, and raises the call's error instead; redis-py can
drop one that meets a connection attempt. A loop that tries again after errors would then run forever.
"""

from __future__ import annotations

import asyncio


def end_if_cancelled() -> None:
    """Raises CancelledError if the running task was told to end; for after an error in a standing loop."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
