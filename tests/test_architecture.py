"""Rules of the tree that no type checker sees. Import rules between packages: [tool.importlinter]."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = [
    "protos",
    "services/core",
    "services/engine",
    "services/drafter",
    "services/verifier",
    "services/policy",
    "gateway",
    "clients/python",
]
MAX_LINES = 350
# What has no business with the engine, and the command, which only starts it.
TORCH_FREE = {
    "paceline.core": ("torch", "transformers", "paceline.engine"),
    "paceline.wire": ("torch", "transformers", "paceline.engine"),
    "paceline.v1": ("torch", "transformers", "paceline.engine"),
    "paceline.gateway": ("torch", "transformers", "paceline.engine"),
    "paceline.policy": ("torch", "transformers", "paceline.engine"),
    "paceline.cli": ("torch", "transformers"),
}
# Imports every module of the first argument while the other arguments cannot be imported.
IMPORT_WITHOUT = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in sys.argv[2:]):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
        return None

sys.meta_path.insert(0, Blocked())
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def hand_written() -> list[Path]:
    folders = [*SOURCE_ROOTS, "tests", "scripts", "benchmarks", "examples"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [path for path in files if "_pb2" not in path.name]


@pytest.mark.parametrize("package", TORCH_FREE)
def test_imports_without_torch_and_engine(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT, package, *TORCH_FREE[package]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_build_knows_every_source_root() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert build["dev-mode-dirs"] == SOURCE_ROOTS
    assert build["targets"]["wheel"]["packages"] == [f"{root}/paceline" for root in SOURCE_ROOTS]


def test_namespace_has_no_init() -> None:
    for root in SOURCE_ROOTS:
        assert (ROOT / root / "paceline").is_dir()
        assert not (ROOT / root / "paceline" / "__init__.py").exists(), root


def test_every_package_is_typed_and_has_an_init() -> None:
    packages = [path for root in SOURCE_ROOTS for path in (ROOT / root / "paceline").iterdir()]
    for package in packages:
        if package.is_dir() and package.name != "__pycache__":
            assert (package / "py.typed").exists(), package
            assert (package / "__init__.py").exists(), package


def test_files_have_one_job() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in hand_written()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines: name the second job and split"


def test_core_starts_no_process() -> None:
    assert not list((ROOT / "services/core").rglob("__main__.py"))
