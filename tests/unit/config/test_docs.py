"""docs/configuration.md lists every key with its type and default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from paceline.wire.settings import EngineSettings, Section, Settings, VerifierSettings

TEXT = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")


def documented(section: str) -> dict[str, str]:
    """Key to default, as the section's table has them."""
    body = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    (table,) = [part for part in body if part.startswith(f"{section}\n")]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines() if "|" in row]
    return {row[0].strip("`"): row[2] for row in rows[2:]}


def defaults(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, field in model.model_fields.items():
        value: Any = None if field.is_required() else field.default
        if isinstance(value, Section):
            found |= defaults(type(value), f"{name}.")
        else:
            shown = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            found[prefix + name] = shown
    return found


@pytest.mark.parametrize("section", sorted(Settings.model_fields))
def test_every_key_has_its_default_in_the_documentation(section: str) -> None:
    annotation: Any = Settings.model_fields[section].annotation
    model: type[BaseModel] = getattr(annotation, "__args__", [annotation])[0]
    expected = defaults(model)
    if model is VerifierSettings:
        expected = {key: value for key, value in expected.items() if key not in EngineSettings.model_fields}
    assert documented(section) == expected
