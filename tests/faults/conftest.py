"""The whole stack's helper, loaded by path: importlib import mode keeps test folders off sys.path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if "system_stack" not in sys.modules:
    _path = Path(__file__).parents[1] / "system" / "stack.py"
    _spec = importlib.util.spec_from_file_location("system_stack", _path)
    if _spec is None or _spec.loader is None:
        raise ImportError(str(_path))
    sys.modules["system_stack"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["system_stack"])

SETTINGS = {
    "engine.engine": "timed",
    "engine.integrity_check": True,
    "testing.timed.verify_ms": 20,
    "drafters": [{"id": "d0", "kind": "ngram"}],
    "gateway.grace_s": 2,
}
"""Answers last; the ngram drafter finds little in them, so that their length in time is known."""


@pytest.fixture
def fresh_stack(tmp_path: Path) -> Iterator[Any]:
    with sys.modules["system_stack"].running(tmp_path / "run", SETTINGS) as stack:
        yield stack


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    run_dir = tmp_path_factory.mktemp("faults") / "run"
    with sys.modules["system_stack"].running(run_dir, SETTINGS) as stack:
        yield stack
