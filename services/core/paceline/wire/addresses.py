"""Where each role listens and where the others find it."""

from __future__ import annotations

from typing import Literal

from paceline.wire.settings import Listen

Role = Literal["verifier", "drafter", "policy"]

DEFAULT_PORTS: dict[str, int] = {"verifier": 50051, "drafter": 50052, "policy": 50053}
DEFAULT_ADMIN_PORTS: dict[str, int] = {"verifier": 9051, "drafter": 9052, "policy": 9053}


def listen_port(entry: Listen, role: Role) -> int:
    """Port that ``serve`` binds: ``port``, else the one in ``addr``, else the role's default."""
    if entry.port is not None:
        return entry.port
    if entry.addr:
        return int(entry.addr.rsplit(":", 1)[1])
    return DEFAULT_PORTS[role]


def admin_port(entry: Listen, role: Role) -> int:
    return DEFAULT_ADMIN_PORTS[role] if entry.admin_port is None else entry.admin_port


def connect_address(entry: Listen, role: Role) -> str:
    """``host:port`` that other processes dial."""
    return entry.addr or f"127.0.0.1:{listen_port(entry, role)}"
