"""Which processes `paceline up` runs, on which ports, in which order. Pure but for `free_ports`."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.wire.addresses import DEFAULT_ADMIN_PORTS, DEFAULT_PORTS
from paceline.wire.config import is_setting
from paceline.wire.settings import Settings

DRAIN_ORDER = ("gateway", "verifier", "drafter", "policy", "redis")
PORT_RANGE = (15_000, 32_000)
GATEWAY_GRPC_PORT, GATEWAY_ADMIN_PORT = 8001, 9000


@dataclass(frozen=True)
class ChildSpec:
    """One process.

    Attributes:
        socket: a child without a ready line is ready once this Unix socket takes connections.
        after: roles that must be ready before it is started.
        grace_s: time it gets between SIGTERM and SIGKILL.
    """

    role: str
    id: str
    command: tuple[str, ...]
    grace_s: float = 10.0
    socket: Path | None = None
    after: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.role if self.role == self.id else f"{self.role} {self.id}"


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nothing listens on, each different.

    They lie below the range from which the kernel draws the ports of outgoing connections, so that no such
    connection takes one while its owner restarts.
    """
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            port = random.SystemRandom().randrange(*PORT_RANGE)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            ports.append(port)
    return ports


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def resolve(settings: Settings, take_port: Callable[[int], int], redis_url: str) -> Settings:
    """Settings with every address fixed, so that all children agree and restarts keep theirs.

    Beside a gateway on its default port, the first worker of each role gets the role's default ports.

    Args:
        take_port: a free port, the given one if it is not 0 and nobody has it.
    """
    gateway = settings.gateway
    default = gateway.port == type(gateway)().port

    def listening(entry: Any, role: str, *, first: bool = True) -> Any:
        if entry.addr:
            return entry
        wanted = (DEFAULT_PORTS[role], DEFAULT_ADMIN_PORTS[role]) if default and first else (0, 0)
        return entry.model_copy(
            update={
                "port": entry.port or take_port(0 if entry.port == 0 else wanted[0]),
                "admin_port": entry.admin_port or take_port(0 if entry.admin_port == 0 else wanted[1]),
            }
        )

    grpc_port = GATEWAY_GRPC_PORT if gateway.grpc_port is None and default else gateway.grpc_port
    admin_port = GATEWAY_ADMIN_PORT if gateway.admin_port is None and default else gateway.admin_port
    return settings.model_copy(
        update={
            "verifiers": tuple(
                listening(v, "verifier", first=i == 0) for i, v in enumerate(settings.verifiers)
            ),
            "drafters": tuple(listening(d, "drafter", first=i == 0) for i, d in enumerate(settings.drafters)),
            "policy": listening(settings.policy, "policy"),
            "gateway": gateway.model_copy(
                update={
                    "port": gateway.port or take_port(0),
                    "grpc_port": grpc_port or take_port(0),
                    "admin_port": admin_port or take_port(0),
                }
            ),
            "queue": settings.queue.model_copy(update={"url": settings.queue.url or redis_url}),
        }
    )


def serve_command(role: str, worker_id: str, config: Path, run_dir: Path) -> tuple[str, ...]:
    return (
        *paceline_command("serve", role),
        *("--id", worker_id, "--config", str(config), "--run-dir", str(run_dir / f"{role}-{worker_id}")),
    )


def paceline_command(*arguments: str) -> tuple[str, ...]:
    # -P: the caller's folder must not come before the installed package.
    return (sys.executable, "-P", "-m", "paceline.cli.main", *arguments)


def processes(
    settings: Settings, config: Path, run_dir: Path, environ: Mapping[str, str], redis: ChildSpec | None
) -> list[ChildSpec]:
    """The children of resolved settings; entries with ``addr`` are someone else's."""
    environment = {key: value for key, value in environ.items() if not is_setting(key)}

    def child(role: str, worker_id: str, after: tuple[str, ...] = (), grace_s: float = 10.0) -> ChildSpec:
        command = serve_command(role, worker_id, config, run_dir)
        return ChildSpec(role, worker_id, command, grace_s, after=after, environment=environment)

    children = [] if redis is None else [redis]
    if not settings.policy.addr:
        children.append(child("policy", "policy"))
    children += [child("drafter", d.id) for d in settings.drafters if not d.addr]
    # A worker gets the gateway's grace too: by then it has only the work the gateway left.
    grace_s = settings.gateway.grace_s + 5
    children += [child("verifier", v.id, grace_s=grace_s) for v in settings.verifiers if not v.addr]
    children.append(child("gateway", "gateway", after=() if redis is None else ("redis",), grace_s=grace_s))
    return children


def needed_models(settings: Settings) -> list[str]:
    """Model names or paths that must be on disk: the target, for weights or tokenizer, and draft models."""
    drafts = [d.path for d in settings.drafters if d.kind == "model" and not d.addr]
    return list(dict.fromkeys([settings.model.target, *drafts]))
