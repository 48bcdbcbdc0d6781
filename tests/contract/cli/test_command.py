"""The `paceline` command as scripts see it: exit codes, what goes to stdout, messages that name the cause."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.wire.admin import AdminServer
from paceline.wire.server import GrpcServer

PACELINE = Path(sys.executable).with_name("paceline")
COMMANDS = ("up", "serve", "health", "doctor", "config", "chat", "models", "bench", "explain", "top")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


async def ran(*arguments: str) -> tuple[int, str, str]:
    """Runs the command beside the test's own event loop."""
    import asyncio

    process = await asyncio.create_subprocess_exec(
        PACELINE, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


def test_version_is_fast_and_loads_no_engine() -> None:
    script = (
        "import sys\n"
        "sys.argv = ['paceline', '--version']\n"
        "from paceline.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as done: assert not done.code, done.code\n"
        "heavy = {'torch', 'grpc', 'httpx', 'pydantic', 'numpy', 'redis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("paceline ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(cli: CliRunner, command: str) -> None:
    result = cli.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


def test_demo_is_not_listed(cli: CliRunner) -> None:
    assert "demo" not in cli.invoke(app, ["--help"]).stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no-such-command"], "no-such-command"),
        (["up", "--no-such-flag"], "--no-such-flag"),
        (["up", "--set", "gateway.prot=1"], "gateway.prot: unknown key"),
        (["up", "--port", "70000"], "gateway.port"),
        (["up", "--config", "/no/such/file.yaml"], "/no/such/file.yaml"),
        (["serve"], "role"),
        (["serve", "cook"], "cook"),
        (["serve", "verifier", "--id", "v9"], "v9"),
        (["serve", "verifier", "--set", "verifiers=[{id: a}, {id: b}]"], "--id: want one of a, b"),
        (["serve", "drafter", "--set", "drafters=[]"], "--id"),
        (["config", "show", "--set", "speculation.k=99"], "speculation.k: want auto or an integer"),
        (["config", "show", "--set", "engine.engine=timed"], "PACELINE_TESTING=1"),
        (["health", "ftp://x"], "URL"),
        (["explain"], "REQUEST_ID or --last"),
        (["explain", "r", "--last"], "REQUEST_ID or --last"),
        (["bench", "--url", "http://x", "--model", "m", "--seconds", "1"], "--prompts, --trace, --lengths"),
        (
            ["bench", "--url", "http://x", "--model", "m", "--seconds", "1", "--lengths", "1", "--rate", "1"],
            "--lengths",
        ),
        (["bench", "--model", "m", "--seconds", "1"], "--url"),
        (["demo", "--dtype", "int8"], "DTYPE"),
    ],
)
def test_wrong_usage_exits_2_and_names_it(
    cli: CliRunner, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str
) -> None:
    monkeypatch.delenv("PACELINE_TESTING", raising=False)
    result = cli.invoke(app, arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stdout == ""


def test_config_show_prints_what_is_in_force(cli: CliRunner) -> None:
    arguments = ["config", "show", "--set", "verifiers.v0.dtype=float32"]
    as_yaml = yaml.safe_load(cli.invoke(app, arguments).stdout)
    as_json = json.loads(cli.invoke(app, [*arguments, "--json"]).stdout)
    assert as_yaml == as_json
    assert as_json["verifiers"][0]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cret@far:6379/0", "redis://:***@far:6379/0"),
        ("redis://user:s3@cret@far/0", "redis://user:***@far/0"),
        ("redis://far:6379/0", "redis://far:6379/0"),
    ],
)
def test_config_show_hides_passwords(cli: CliRunner, url: str, shown: str) -> None:
    result = cli.invoke(app, ["config", "show", "--json", "--set", f"queue.url={url}"])
    assert json.loads(result.stdout)["queue"]["url"] == shown


def test_models_that_are_not_there(cli: CliRunner) -> None:
    result = cli.invoke(app, ["models", "path", "smollm2-135m-instruct"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "models pull smollm2-135m-instruct" in result.stderr
    (row,) = json.loads(cli.invoke(app, ["models", "list", "--json"]).stdout)["models"]
    assert (row["name"], row["present"]) == ("smollm2-135m-instruct", False)


def test_models_path_prints_the_folder_alone(cli: CliRunner, tmp_path: Path) -> None:
    assert cli.invoke(app, ["models", "path", str(tmp_path)]).stdout == f"{tmp_path}\n"


def test_doctor_reports_what_is_missing(cli: CliRunner) -> None:
    arguments = ["doctor", "--json", "--set", "gateway.port=0", "--set", "queue.url=redis://127.0.0.1:1/0"]
    result = cli.invoke(app, arguments)
    assert result.exit_code == 1
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["python"]["ok"]
    assert not checks["redis"]["ok"]
    assert not checks["model smollm2-135m-instruct"]["ok"]
    assert "models pull" in checks["model smollm2-135m-instruct"]["detail"]


@pytest.mark.parametrize("command", [["top"], ["explain", "--last"]])
def test_no_admin_port_is_a_failure(cli: CliRunner, command: list[str]) -> None:
    result = cli.invoke(app, [*command, "--admin", "http://127.0.0.1:1", "--json"])
    assert result.exit_code == 1
    assert "http://127.0.0.1:1/" in result.stderr


async def test_health_of_an_http_process() -> None:
    server = AdminServer(CollectorRegistry())
    url = await server.start("127.0.0.1", 0)
    try:
        assert (await ran("health", url))[0] == 0
        code, out, _ = await ran("health", f"{url}/nowhere", "--json")
        assert code == 1
        assert json.loads(out) == {"url": f"{url}/nowhere", "healthy": False, "problem": "HTTP 404"}
    finally:
        await server.stop()
    assert (await ran("health", url))[0] == 1


async def test_health_of_a_grpc_process() -> None:
    server = GrpcServer()
    address = await server.start("127.0.0.1", 0, [])
    try:
        assert (await ran("health", f"grpc://{address}"))[0] == 0
    finally:
        await server.stop(0)
    code, _, err = await ran("health", f"grpc://{address}")
    assert code == 1
    assert "UNAVAILABLE" in err


async def test_bench_without_a_server_fails(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code, out, err = await ran(
        *("bench", "--url", "http://127.0.0.1:1", "--model", "m", "--lengths", "4:2", "--rate", "20"),
        *("--arrival", "constant", "--seconds", "0.1", "--json", str(file)),
    )
    assert code == 1
    assert "no request was answered (ConnectError)" in err
    result = json.loads(file.read_text())
    assert (result["requests"], result["errors"]) == (2, 2)
    assert "2 requests, 2 errors" in out
