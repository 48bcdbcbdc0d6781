"""The admin HTTP port of every process: metrics, health, and what the role adds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from paceline.wire.process import StartupError


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket, or StartupError if the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


class HttpServer:
    """uvicorn on the process's own event loop; signals stay with the process."""

    def __init__(self, app: object, *, timeout_graceful_shutdown_s: int | None = 2) -> None:
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=timeout_graceful_shutdown_s,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    async def start(self, host: str, port: int) -> str:
        """Returns ``http://host:port`` once connections are accepted."""
        self._listener = bind(host, port)
        bound = self._listener.getsockname()[1]
        # uvicorn's serve() would install its own signal handlers.
        self._task = asyncio.create_task(self._server._serve([self._listener]))
        while not self._server.started:
            if self._task.done():
                raise StartupError(f"HTTP cannot listen on {host}:{bound}")
            await asyncio.sleep(0.01)
        return f"http://{host}:{bound}"

    async def stop(self) -> None:
        if self._task is None:
            return
        self._server.should_exit = True
        await self._task
        if self._listener is not None:
            self._listener.close()


class AdminServer:
    """``/metrics``, ``/health`` and the role's own routes. Keep it off public networks."""

    def __init__(self, registry: CollectorRegistry, routes: Sequence[BaseRoute] = ()) -> None:
        async def metrics(_: Request) -> Response:
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

        async def health(_: Request) -> Response:
            return JSONResponse({"status": "ok"})

        own = [Route("/metrics", metrics), Route("/health", health)]
        self._http = HttpServer(Starlette(routes=[*own, *routes]))

    async def start(self, host: str, port: int) -> str:
        return await self._http.start(host, port)

    async def stop(self) -> None:
        await self._http.stop()
