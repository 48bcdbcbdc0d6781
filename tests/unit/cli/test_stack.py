"""The run folder: private, held by one stack, nothing left but state.json."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from paceline.cli.stack import RunDirTakenError, state_folder, write_private


def test_no_folder_asked_for_is_none() -> None:
    with state_folder(None) as folder:
        assert folder is None


def test_a_folder_is_made_private_and_kept_with_its_state(tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "run"
    with state_folder(run_dir) as folder:
        assert folder == run_dir
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
        (run_dir / "state.json").write_text("{}")
    assert [path.name for path in run_dir.iterdir()] == ["state.json"]


def test_the_last_runs_state_is_removed_first(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("old")
    (tmp_path / "mine").touch()
    with state_folder(tmp_path):
        assert not (tmp_path / "state.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_holds_one_stack(tmp_path: Path) -> None:
    with state_folder(tmp_path), pytest.raises(RunDirTakenError, match=str(tmp_path)), state_folder(tmp_path):
        pass
    with state_folder(tmp_path):
        pass


def test_resolved_settings_are_private(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    write_private(file, "{}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == "{}"
