"""Which processes run, in which order, on which ports."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from paceline.cli.plan import (
    DRAIN_ORDER,
    PORT_RANGE,
    ChildSpec,
    free_ports,
    needed_models,
    processes,
    resolve,
    serve_command,
)
from paceline.wire.config import load_settings
from paceline.wire.settings import Settings


def counting(start: int = 20_000) -> Callable[[int], int]:
    """Nobody has the wanted port, so it is given."""
    ports = iter(range(start, start + 1000))
    return lambda wanted: wanted or next(ports)


def loaded(*assignments: str) -> Settings:
    return load_settings(None, assignments, environ={})


def test_the_default_gateway_has_its_documented_ports() -> None:
    gateway = resolve(loaded(), counting(), "unix:///s").gateway
    assert (gateway.port, gateway.grpc_port, gateway.admin_port) == (8000, 8001, 9000)


def test_beside_the_default_gateway_the_first_workers_have_theirs() -> None:
    settings = resolve(loaded("verifiers=[{id: a}, {id: b}]"), counting(), "")
    first, second = settings.verifiers
    assert (first.port, first.admin_port) == (50051, 9051)
    assert second.port not in (None, 50051)
    assert (settings.drafters[0].port, settings.drafters[0].admin_port) == (50052, 9052)
    assert (settings.policy.port, settings.policy.admin_port) == (50053, 9053)
    elsewhere = resolve(loaded("gateway.port=7000"), counting(), "")
    assert elsewhere.verifiers[0].port not in (None, 50051)


def test_another_http_port_gets_free_ones_beside_it() -> None:
    gateway = resolve(loaded("gateway.port=0"), counting(), "").gateway
    assert len({gateway.port, gateway.grpc_port, gateway.admin_port}) == 3
    assert {gateway.port, gateway.grpc_port, gateway.admin_port}.isdisjoint({0, None, 8000, 8001, 9000})


def test_ports_given_are_kept() -> None:
    settings = resolve(
        loaded("gateway.port=7000", "gateway.grpc_port=7001", "verifiers.v0.port=7002"), counting(), ""
    )
    assert (settings.gateway.port, settings.gateway.grpc_port) == (7000, 7001)
    assert settings.verifiers[0].port == 7002


def test_every_worker_gets_ports_of_its_own() -> None:
    settings = resolve(loaded("verifiers=[{id: a}, {id: b}]"), counting(), "")
    entries = [*settings.verifiers, *settings.drafters, settings.policy]
    ports = [port for entry in entries for port in (entry.port, entry.admin_port)]
    assert None not in ports
    assert len(set(ports)) == len(ports) == 8


def test_a_worker_with_an_address_is_not_started(tmp_path: Path) -> None:
    settings = resolve(
        loaded("verifiers=[{id: a, addr: 'far:1'}, {id: b}]", "policy.addr=far:2"), counting(), ""
    )
    assert settings.verifiers[0].port is None
    children = processes(settings, tmp_path / "c", tmp_path, {}, None)
    assert [(c.role, c.id) for c in children] == [
        ("drafter", "d0"),
        ("verifier", "b"),
        ("gateway", "gateway"),
    ]


def test_the_queue_url_is_ours_only_if_none_is_given() -> None:
    assert resolve(loaded(), counting(), "unix:///s").queue.url == "unix:///s"
    assert resolve(loaded("queue.url=redis://far"), counting(), "").queue.url == "redis://far"


def test_the_gateway_waits_for_redis_and_drains_first(tmp_path: Path) -> None:
    redis = ChildSpec("redis", "redis", ("valkey-server",))
    children = processes(resolve(loaded(), counting(), ""), tmp_path / "c", tmp_path, {}, redis)
    assert [c.role for c in children] == ["redis", "policy", "drafter", "verifier", "gateway"]
    assert next(c for c in children if c.role == "gateway").after == ("redis",)
    assert DRAIN_ORDER == ("gateway", "verifier", "drafter", "policy", "redis")
    assert {c.role for c in children} == set(DRAIN_ORDER)


def test_children_do_not_see_settings_in_their_environment(tmp_path: Path) -> None:
    kept = {"PACELINE_TESTING": "1", "PACELINE_CACHE_DIR": "/c", "PATH": "/bin"}
    environ = {**kept, "PACELINE_GATEWAY__PORT": "1", "PACELINE_QUEUE": "{}"}
    children = processes(resolve(loaded(), counting(), ""), tmp_path / "c", tmp_path, environ, None)
    assert all(child.environment == kept for child in children)


def test_a_child_is_told_config_id_and_folder(tmp_path: Path) -> None:
    command = serve_command("verifier", "v1", tmp_path / "c.json", tmp_path)
    assert command[-8:] == (
        "serve",
        "verifier",
        "--id",
        "v1",
        "--config",
        str(tmp_path / "c.json"),
        "--run-dir",
        str(tmp_path / "verifier-v1"),
    )


def test_models_to_fetch() -> None:
    settings = loaded(
        "model.target=t", "drafters=[{id: a, kind: model, path: d}, {id: b, kind: model, path: d}, {id: c}]"
    )
    assert needed_models(settings) == ["t", "d"]


def test_free_ports_are_free_and_below_the_ephemeral_range() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(PORT_RANGE[0] <= port < PORT_RANGE[1] for port in ports)
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
