"""Children that do not outlive the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with(parent: int) -> Callable[[], None]:
    """A ``preexec_fn``: the kernel kills the child when ``parent`` dies (Linux; elsewhere nothing)."""

    def prepare() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before prctl took effect
                os._exit(1)

    return prepare
