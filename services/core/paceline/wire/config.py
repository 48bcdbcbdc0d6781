"""Layers of configuration: flag > ``--set`` > environment > file > default."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from paceline.core.errors import ConfigError
from paceline.wire.settings import MAX_DRAFT_TOKENS, Settings, TestingSettings, VerifierSettings

PREFIX = "PACELINE_"
_LISTS = {"verifiers": "id", "drafters": "id", "classes": "name"}
_DEFAULT_LISTS: dict[str, list[dict[str, Any]]] = {
    "verifiers": [{"id": "v0"}],
    "drafters": [{"id": "d0"}],
    "classes": [{"name": "default"}],
}
_WANTED = {"speculation.k": f"want auto or an integer from 0 to {MAX_DRAFT_TOKENS}"}


def testing_allowed(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get("PACELINE_TESTING") == "1"


def is_setting(variable: str) -> bool:
    """Whether an environment variable of this name is a layer of the configuration."""
    return _variable_key(variable) is not None


def load_settings(
    file: Path | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The settings in force.

    Args:
        file: YAML file.
        assignments: ``a.b=value`` strings of ``--set``, values in YAML; list entries by id
            (``verifiers.v0.dtype=float32``).
        flags: dotted key to value, from command line flags of their own.
        environ: ``PACELINE_A__B=value``; a whole section is ``PACELINE_A``.

    Raises:
        ConfigError: naming the key, for a wrong type, an unknown key or id, or a file that cannot be read.
    """
    environ = os.environ if environ is None else environ
    tree: dict[str, Any] = _read(file) if file else {}
    for name, entries in _DEFAULT_LISTS.items():
        tree.setdefault(name, [dict(entry) for entry in entries])
    for variable in sorted(environ):
        if path := _variable_key(variable):
            _assign(tree, path, _yaml(environ[variable], variable), variable)
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {assignment}: want KEY=VALUE")
        _assign(tree, key.strip().split("."), _yaml(value, key), key)
    for dotted, value in (flags or {}).items():
        _assign(tree, dotted.split("."), value, dotted)
    _engine_defaults(tree)
    try:
        settings = Settings.model_validate(_tuples(tree))
    except ValidationError as error:
        raise ConfigError(_explain(error, tree)) from None
    _check(settings, testing=testing_allowed(environ))
    return settings


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: want a mapping of sections")
    # A section whose keys are all commented out reads as null.
    return {str(key): value for key, value in tree.items() if value is not None}


def _variable_key(variable: str) -> list[str] | None:
    """Key path of an environment variable, or None for one that is not ours.

    Orchestrators inject names such as PACELINE_GATEWAY_PORT, so only ``__`` and whole sections count.
    """
    if not variable.startswith(PREFIX):
        return None
    rest = variable.removeprefix(PREFIX).lower()
    if "__" in rest or (rest in Settings.model_fields and rest != "testing"):
        return rest.split("__")
    return None


def _yaml(text: str, key: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: value is not YAML: {text!r}") from None


def _assign(tree: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    node: Any = tree
    for depth, part in enumerate(path[:-1]):
        if isinstance(node, list):
            node = _entry(node, path[0], part, name)
        elif isinstance(node, dict):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            raise ConfigError(f"{name}: {'.'.join(path[:depth])} has no keys")
    if not isinstance(node, dict):
        raise ConfigError(f"{name}: {'.'.join(path[:-1])} has no key {path[-1]!r}")
    node[path[-1]] = value


def _entry(entries: list[Any], section: str, identifier: str, name: str) -> Any:
    label = _LISTS.get(section, "id")
    for entry in entries:
        if isinstance(entry, dict) and str(entry.get(label)).lower() == identifier.lower():
            return entry
    raise ConfigError(f"{name}: {section} has no entry with {label} {identifier!r}")


def _engine_defaults(tree: dict[str, Any]) -> None:
    """Keys of ``engine`` hold for every verifier that does not set them itself."""
    engine, verifiers = tree.get("engine"), tree.get("verifiers")
    if not isinstance(engine, dict) or not isinstance(verifiers, list):
        return
    known = {key: value for key, value in engine.items() if key in VerifierSettings.model_fields}
    tree["verifiers"] = [{**known, **v} if isinstance(v, dict) else v for v in verifiers]


def _tuples(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}


def _explain(error: ValidationError, tree: Mapping[str, Any]) -> str:
    lines = []
    in_engine = {item["loc"][1:] for item in error.errors() if item["loc"][:1] == ("engine",)}
    for item in error.errors():
        if item["loc"][:1] == ("verifiers",) and item["loc"][2:] in in_engine:
            continue  # inherited from `engine`, where it is named already
        parts = [str(part) for part in item["loc"]]
        if len(parts) > 1 and parts[0] in _LISTS and parts[1].isdigit():
            entry = tree[parts[0]][int(parts[1])]
            if isinstance(entry, dict):
                parts[1] = str(entry.get(_LISTS[parts[0]], parts[1]))
        lines.append(_line(parts, item["type"], item["msg"]))
    return "; ".join(dict.fromkeys(lines))


def _line(parts: list[str], kind: str, message: str) -> str:
    if wanted := _WANTED.get(".".join(parts[:2])):
        return f"{'.'.join(parts[:2])}: {wanted}"
    key = ".".join(parts)
    if kind == "extra_forbidden":
        return f"{key}: unknown key"
    if kind == "string_pattern_mismatch" and parts[-1] == "addr":
        return f"{key}: want host:port"
    if kind == "value_error":  # our own validators say "key: reason"
        return f"{key}.{message.removeprefix('Value error, ')}"
    return f"{key}: {message[0].lower()}{message[1:]}"


def _check(settings: Settings, *, testing: bool) -> None:
    for section, label in _LISTS.items():
        names = [getattr(entry, label) for entry in getattr(settings, section)]
        if len(set(names)) != len(names):
            raise ConfigError(f"{section}: every {label} must be unique")
    if not settings.verifiers:
        raise ConfigError("verifiers: at least one is needed")
    if not settings.classes:
        raise ConfigError("classes: at least one is needed")
    shared = {v.id for v in settings.verifiers} & {d.id for d in settings.drafters}
    if shared:
        raise ConfigError(f"drafters: id {min(shared)!r} is also a verifier's; every worker needs its own")
    if not testing:
        _check_no_testing(settings)


def _check_no_testing(settings: Settings) -> None:
    refused = [
        f"testing.{key}" for key, value in TestingSettings() if getattr(settings.testing, key) != value
    ]
    refused += [f"verifiers.{v.id}.engine: timed" for v in settings.verifiers if v.engine == "timed"]
    refused += [f"drafters.{d.id}.kind: timed" for d in settings.drafters if d.kind == "timed"]
    if refused:
        raise ConfigError("; ".join(f"{key}: refused unless PACELINE_TESTING=1" for key in refused))


def check_servable(settings: Settings) -> list[str]:
    """Keys that hold a value this version does not act on, and that change nothing but speed or shedding.

    Raises:
        ConfigError: naming every key whose value is valid but cannot be served yet, such as TLS files.
    """
    speculation, control = settings.speculation, settings.control
    refused = [f"tls.{key}" for key, value in settings.tls if value]
    if settings.tenants.file:
        refused.append("tenants.file")
    if speculation.mode == "rejection":
        refused.append("speculation.mode: rejection")
    if control.kind not in ("paceline", "off", "fixed"):
        refused.append(f"control.kind: {control.kind}")
    refused += [f"verifiers.{v.id}.engine: vllm" for v in settings.verifiers if v.engine == "vllm"]
    url = settings.queue.url
    if url and not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError("queue.url: want redis://, rediss:// or unix://")
    if refused:
        raise ConfigError("; ".join(f"{key} is not available in this version" for key in refused))
    if control.kind == "fixed" and control.arg not in range(MAX_DRAFT_TOKENS + 1):
        raise ConfigError(f"control.arg: kind 'fixed' needs a whole draft length, 0 to {MAX_DRAFT_TOKENS}")
    unused = [f"verifiers.{v.id}.compile" for v in settings.verifiers if v.compile]
    if speculation.draft_ahead:
        unused.append("speculation.draft_ahead")
    for entry in settings.classes:
        unused += [f"classes.{entry.name}.{k}" for k in ("reserved_share", "shed_order") if getattr(entry, k)]
    return unused
