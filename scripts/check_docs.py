"""Checks README.md, CONTRIBUTING.md, CHANGELOG.md and docs/ against the repository.

Commands in ``sh`` and ``bash`` fences must name an existing make target, ``paceline`` command with its flags,
file or module; ``yaml`` fences must be a valid configuration; relative links and anchors must resolve.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.wire.config import load_settings

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = frozenset(["cat", "cd", "curl", "echo", "export", "git", "grpcurl", "jq", "kill", "mkdir", "pip"])
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_SEPARATORS = frozenset({"&&", "||", "|", ";", "&"})


def documents() -> list[Path]:
    """The checked files."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [path for path in (*top, *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]


def problems(text: str, folder: Path) -> list[str]:
    """What is wrong in a Markdown ``text`` that lies in ``folder``."""
    found = []
    for language, block in _FENCE.findall(text):
        if language in ("sh", "bash", "console"):
            for words in commands(block):
                found += [f"`{shlex.join(words)}`: {problem}" for problem in command_problems(words)]
        elif language in ("yaml", "yml"):
            found += yaml_problems(block)
    return found + link_problems(_FENCE.sub("", text), folder)


def commands(block: str) -> Iterator[list[str]]:
    """Simple commands of a shell snippet as words; here-documents and comments are left out."""
    lines = iter(block.replace("\\\n", " ").splitlines())
    pending = ""
    for line in lines:
        pending += line.removeprefix("$ ") if not pending else "\n" + line
        try:
            lexer = shlex.shlex(pending, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # a quotation goes on in the next line
            continue
        pending = ""
        if "<<" in words:
            end = words[words.index("<<") + 1]
            for body in lines:
                if body.strip() == end:
                    break
        yield from _split(words)
    if pending:
        yield [pending]


def _split(words: list[str]) -> Iterator[list[str]]:
    current: list[str] = []
    for word in [*words, ";"]:
        if word not in _SEPARATORS:
            current.append(word)
            continue
        while current and _ASSIGNMENT.match(current[0]):
            current.pop(0)
        if current:
            yield current
        current = []


def command_problems(words: list[str]) -> list[str]:
    """Why one command cannot work in a checkout of this repository."""
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "make":
        return _make_problems(arguments)
    if program == "paceline":
        return _paceline_problems(arguments)
    if program.startswith("python") or program in ("bash", "sh"):
        return _script_problems(arguments)
    if program in ("docker", "docker-compose"):
        return _compose_problems(arguments)
    if program in OUTSIDE or (ROOT / words[0]).is_file() or program in ("pytest", "ruff", "mypy"):
        return []
    return ["unknown command"]


def make_targets() -> frozenset[str]:
    """Targets of the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = re.findall(r"^([A-Za-z0-9_ -]+):(?!=)", text, re.MULTILINE)
    return frozenset(name for line in names for name in line.split())


def _make_problems(arguments: list[str]) -> list[str]:
    goals = [word for word in arguments if not word.startswith("-") and "=" not in word]
    return [f"no make target {goal!r}" for goal in goals if goal not in make_targets()]


def _paceline_problems(arguments: list[str]) -> list[str]:
    import typer

    from paceline.cli.main import app

    command: Any = typer.main.get_command(app)
    flags = {"--help"}
    found = []
    for word in arguments:
        subcommands = getattr(command, "commands", None)
        for parameter in command.params:
            flags.update(parameter.opts, parameter.secondary_opts)
        if word.startswith("-"):
            if word.partition("=")[0] not in flags:
                found.append(f"no flag {word}")
        elif subcommands is not None:
            if word not in subcommands:
                return [f"no command {word!r}"]
            command = subcommands[word]
    return found


def _script_problems(arguments: list[str]) -> list[str]:
    if arguments[:1] == ["-m"]:
        name = arguments[1]
        return [] if importlib.util.find_spec(name) else [f"no module {name}"]
    script = next((word for word in arguments if not word.startswith("-")), None)
    if script is None or script == "-" or "-c" in arguments or (ROOT / script).is_file():
        return []
    return [f"no file {script}"]


def _compose_problems(arguments: list[str]) -> list[str]:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    profiles = set(re.findall(r"profiles: \[(\w+)\]", text))
    asked = [b for a, b in pairwise(arguments) if a == "--profile"]
    files = [b for a, b in pairwise(arguments) if a == "-f"]
    return [f"no profile {name!r}" for name in asked if name not in profiles] + [
        f"no file {name}" for name in files if not (ROOT / name).is_file()
    ]


def yaml_problems(block: str) -> list[str]:
    """Configuration examples are loaded as ``--config`` loads them."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(block)
        file.flush()
        try:
            load_settings(file=Path(file.name), environ={})
        except ConfigError as error:
            return [f"configuration example: {error}"]
    return []


def link_problems(text: str, folder: Path) -> list[str]:
    """Relative links without a file, and anchors without a heading."""
    found = []
    for target in _LINK.findall(text):
        path, _, anchor = target.partition("#")
        if ":" in path:
            continue
        file = folder / path if path else None
        if file is not None and not file.exists():
            found.append(f"link {target}: no such file")
        elif anchor and anchor not in _anchors(file.read_text(encoding="utf-8") if file else text):
            found.append(f"link {target}: no such heading")
    return found


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ +(.*?)\s*$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def main() -> int:
    """Prints every problem; 1 if there is one."""
    found = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in documents()
        for problem in problems(path.read_text(encoding="utf-8"), path.parent)
    ]
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
