"""Admission in Redis: what waits, who was granted which verifier, and the leases that hold credit."""

from paceline.gateway.queue.admission import AdmissionQueue
from paceline.gateway.queue.embedded import EmbeddedRedis
from paceline.gateway.queue.server import connect
from paceline.gateway.queue.values import Grant, Lease, QueueDepth, Ticket, WorkerCredit

__all__ = [
    "AdmissionQueue",
    "EmbeddedRedis",
    "Grant",
    "Lease",
    "QueueDepth",
    "Ticket",
    "WorkerCredit",
    "connect",
]
