"""gRPC channels to peers: keepalive above the servers' minimum, size limits, quick reconnects."""

from __future__ import annotations

import grpc

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_MS = 30_000

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the least time that a connection attempt gets.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Every link has a connection of its own, so that one peer's restart is seen by its own link.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """An insecure channel to ``host:port``. Calls on it must be cancelled explicitly by their owner."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
