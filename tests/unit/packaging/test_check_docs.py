"""The documentation check finds what it promises to find."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def check_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docs", ROOT / "scripts/check_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fenced(language: str, body: str) -> str:
    return f"```{language}\n{body}\n```\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("make no-such-target", "no make target 'no-such-target'"),
        ("paceline no-such-command", "no command 'no-such-command'"),
        ("paceline up --no-such-flag", "no flag --no-such-flag"),
        ("echo hello && paceline no-such-command", "no command"),
        ("A=b bash scripts/absent.sh", "no file scripts/absent.sh"),
        (".venv/bin/python -m paceline.absent", "no module paceline.absent"),
        ("docker compose --profile absent up", "no profile 'absent'"),
        ("frobnicate", "unknown command"),
    ],
)
def test_wrong_commands_are_named(check_docs: ModuleType, body: str, words: str) -> None:
    (problem,) = check_docs.problems(fenced("sh", body), ROOT)
    assert words in problem


def test_right_commands_pass(check_docs: ModuleType) -> None:
    body = (
        "$ make test  # a comment\n"
        "PORT=1 make demo PROMPT='two words'\n"
        "paceline serve gateway \\\n  --set gateway.port=0\n"
        "bash scripts/check.sh\n"
        "curl -s http://127.0.0.1:8000/v1/models -d '{\n  \"a\": 1\n}' | jq .\n"
        "cat > fleet.yaml <<EOF\nmodel: {}\nEOF\n"
        "docker compose --profile gpu up"
    )
    assert check_docs.problems(fenced("bash", body), ROOT) == []


def test_here_documents_hold_no_commands(check_docs: ModuleType) -> None:
    assert list(check_docs.commands("cat <<EOF\nnot a command\nEOF\nmake test")) == [
        ["cat", "<<", "EOF"],
        ["make", "test"],
    ]


def test_configuration_examples_are_loaded(check_docs: ModuleType) -> None:
    assert check_docs.problems(fenced("yaml", "gateway: {port: 9}"), ROOT) == []
    (problem,) = check_docs.problems(fenced("yaml", "gateway: {prot: 9}"), ROOT)
    assert "gateway.prot" in problem


def test_links_and_anchors_must_resolve(check_docs: ModuleType) -> None:
    text = "# One title\n[a](LICENSE) [b](https://example.org/x) [c](#one-title)"
    assert check_docs.problems(text, ROOT) == []
    assert len(check_docs.problems("[a](absent.md) [b](#absent)", ROOT)) == 2


def test_other_fences_are_left_alone(check_docs: ModuleType) -> None:
    assert check_docs.problems(fenced("text", "frobnicate") + fenced("", "paceline nothing"), ROOT) == []
