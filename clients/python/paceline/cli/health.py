"""`paceline health URL`: one probe, for people and for container health checks."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import typer

from paceline.cli.console import EXIT_USAGE, AsJson, fail, print_json


def health(
    url: Annotated[
        str, typer.Argument(help="http://host:port[/path] (default path /health) or grpc://host:port.")
    ],
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.")] = 5.0,
    json: AsJson = False,
) -> None:
    """Exit 0 if the process at URL answers that it is well, else 1."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "grpc") or not parts.netloc:
        fail(f"URL: want http://host:port or grpc://host:port, got {url!r}", EXIT_USAGE)
    probe = _grpc if parts.scheme == "grpc" else _http
    problem = probe(parts.netloc if parts.scheme == "grpc" else url, timeout_s)
    if json:
        print_json({"url": url, "healthy": problem is None, "problem": problem})
    if problem is not None:
        fail(f"{url}: {problem}")


def _http(url: str, timeout_s: float) -> str | None:
    import httpx

    target = url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/health"
    try:
        response = httpx.get(target, timeout=timeout_s, trust_env=False)
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None if response.is_success else f"HTTP {response.status_code}"


def _grpc(address: str, timeout_s: float) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return None if name == "SERVING" else name
