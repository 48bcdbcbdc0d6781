"""What goes into the admission queue and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that waits. ``kv_tokens`` = sequences x (prompt + longest output)."""

    request_id: str
    slo_class: str
    priority: int
    """Of the class; lower goes first."""
    tenant: str
    sequences: int
    kv_tokens: int
    deadline_s: float
    """Seconds from now that the request may wait."""


@dataclass(frozen=True, slots=True)
class WorkerCredit:
    """Total capacity of a live verifier; what is in use is the sum of its live leases."""

    verifier_id: str
    sequences: int
    kv_tokens: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Grant:
    """A request bound to a verifier; an empty ``verifier_id`` says that its wait is over."""

    request_id: str
    verifier_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A granted request as its owner knows it: enough to restore it in an emptied Redis."""

    request_id: str
    verifier_id: str
    epoch: int
    slo_class: str
    tenant: str
    sequences: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class QueueDepth:
    waiting_requests: int
    waiting_tokens: int
    reserved: int
    leases: int
    waiting_by_class: Mapping[str, int]
