"""Models for the tests of the torch engine."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from paceline.core.errors import ConfigError
from paceline.engine.store import pull
from paceline.wire.models import ModelFiles, locate

# importlib import mode keeps test folders off sys.path; the helper module is loaded by path.
_spec = importlib.util.spec_from_file_location("engine_torch_support", Path(__file__).with_name("support.py"))
assert _spec is not None
assert _spec.loader is not None
_support = importlib.util.module_from_spec(_spec)
sys.modules["engine_torch_support"] = _support
_spec.loader.exec_module(_support)


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model of an architecture, made at first use."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            family, changes = _support.ARCHITECTURES[name]
            made[name] = _support.save_model(tmp_path_factory.mktemp(name), family, **changes)
        return made[name]

    return folder


@pytest.fixture(scope="session")
def smollm() -> ModelFiles:
    try:
        pull("smollm2-135m-instruct")
    except ConfigError as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
    return locate("smollm2-135m-instruct")
