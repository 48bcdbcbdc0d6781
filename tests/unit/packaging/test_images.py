"""Each image holds what its process needs, installs only its extras, and starts what exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
IMAGES = {
    "gateway": "gateway/Dockerfile",
    "policy": "services/policy/Dockerfile",
    "drafter": "services/drafter/Dockerfile",
    "verifier": "services/verifier/Dockerfile",
}
PORTS = {
    "gateway": "8000 8001 9000",
    "policy": "50053 9053",
    "drafter": "50052 9052",
    "verifier": "50051 9051",
}
TORCH_FREE = ["gateway", "policy"]
# Imports the command and every module of a role while what its image lacks cannot be imported.
IMPORT_IN_IMAGE = """
import importlib, json, pkgutil, sys

role, absent = sys.argv[1], set(json.load(sys.stdin))

class Absent:
    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        if absent & {".".join(parts[: n + 1]) for n in range(len(parts))}:
            raise ModuleNotFoundError(f"{name} is not in the image", name=name)
        return None

sys.meta_path.insert(0, Absent())
importlib.import_module("paceline.cli.main")
package = importlib.import_module(f"paceline.{role}")
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def instructions(role: str) -> list[tuple[str, str]]:
    text = (ROOT / IMAGES[role]).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in joined.splitlines()]


def arguments(role: str, instruction: str) -> list[str]:
    return [argument for name, argument in instructions(role) if name == instruction]


def copied(role: str) -> list[str]:
    sources = [argument.split()[:-1] for argument in arguments(role, "COPY") if "--from" not in argument]
    return [source for group in sources for source in group]


def extras(role: str) -> set[str]:
    match = re.search(r'"\.\[([\w,]+)\]"', (ROOT / IMAGES[role]).read_text(encoding="utf-8"))
    assert match is not None
    return set(match[1].split(","))


def closure(chosen: set[str]) -> set[str]:
    """Names of the distributions that ``pip install paceline[chosen]`` brings here."""
    found: set[tuple[str, str]] = set()
    waiting = [("paceline", extra) for extra in ("", *chosen)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                child = canonicalize_name(requirement.name)
                waiting += [(child, inner) for inner in ("", *requirement.extras)]
    return {canonicalize_name(name) for name, _ in found}


def absent_modules(role: str) -> list[str]:
    """Top-level modules of everything installed here that the image's extras do not bring."""
    present = closure(extras(role))
    third_party = {
        module
        for module, owners in metadata.packages_distributions().items()
        if module != "paceline" and not {canonicalize_name(owner) for owner in owners} & present
    }
    packages = {
        f"paceline.{path.name}"
        for root in every_root() - set(copied(role))
        for path in (ROOT / root).iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    return sorted(third_party | packages)


def every_root() -> set[str]:
    return set(PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


@pytest.mark.parametrize("role", IMAGES)
def test_copied_sources_exist_and_are_in_the_build_context(role: str) -> None:
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.removeprefix("!") for line in allowed if line.startswith("!")]
    for source in copied(role):
        assert (ROOT / source).exists(), source
        assert any(Path(source).match(pattern) for pattern in patterns), source


@pytest.mark.parametrize("role", IMAGES)
def test_image_holds_only_its_own_roots(role: str) -> None:
    own = "gateway/paceline" if role == "gateway" else f"services/{role}/paceline"
    expected = {"protos/paceline", "services/core/paceline", "clients/python/paceline", own}
    if role not in TORCH_FREE:
        expected.add("services/engine/paceline")
    assert set(copied(role)) & every_root() == expected


@pytest.mark.parametrize("role", IMAGES)
def test_image_installs_its_extras_under_the_constraints(role: str) -> None:
    assert extras(role) == {role, "cli"}
    assert extras(role) <= set(PROJECT["optional-dependencies"])
    installs = [argument for argument in arguments(role, "RUN") if "pip install" in argument]
    assert all("--constraint constraints.txt" in argument for argument in installs)


@pytest.mark.parametrize("role", IMAGES)
def test_image_runs_as_nobody_special_and_starts_its_role(role: str) -> None:
    assert arguments(role, "USER") == ["10001"]
    assert arguments(role, "EXPOSE") == [PORTS[role]]
    assert json.loads(arguments(role, "ENTRYPOINT")[0]) == ["paceline"]
    assert json.loads(arguments(role, "CMD")[0]) == ["serve", role]
    bases = [argument.split()[0] for argument in arguments(role, "FROM")]
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", bases[0])


@pytest.mark.parametrize("role", IMAGES)
def test_health_check_equals_the_one_of_compose(role: str) -> None:
    (health,) = arguments(role, "HEALTHCHECK")
    command = json.loads(health[health.index("[") :])
    assert f'test: [CMD, {command[0]}, {command[1]}, "{command[2]}"]' in (ROOT / "compose.yaml").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("role", IMAGES)
def test_only_engine_images_install_torch(role: str) -> None:
    torch = {"torch", "transformers"} & closure(extras(role))
    assert bool(torch) == (role not in TORCH_FREE)


@pytest.mark.parametrize("role", IMAGES)
def test_role_imports_with_only_what_its_image_holds(role: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_IN_IMAGE, role],
        input=json.dumps(absent_modules(role)),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_constraints_are_plain_public_versions() -> None:
    for name, version in pins().items():
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
        assert Version(version).local is None, name


def test_constraints_pin_every_dependency() -> None:
    pinned = {canonicalize_name(name) for name in pins()}
    assert closure(set(PROJECT["optional-dependencies"])) - pinned == {"paceline"}


def test_constraints_satisfy_the_project() -> None:
    pinned = {canonicalize_name(name): version for name, version in pins().items()}
    texts = [
        *PROJECT["dependencies"],
        *(t for group in PROJECT["optional-dependencies"].values() for t in group),
    ]
    for text in texts:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name != "paceline":
            assert requirement.specifier.contains(pinned[name]), text
