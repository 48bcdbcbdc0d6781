"""How large the KV cache is: closed forms under a known amount of free memory, the statement, the refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from paceline.core.errors import ConfigError
from paceline.engine import kv_cache
from paceline.engine.kv_cache import KvBudget, LayerShape, choose_budget, token_bytes
from paceline.engine.runner import TorchRunner

MIB = 1 << 20
PER_TOKEN = 8192
"""Bytes; 16 tokens make one block of 128 KiB."""


def choose(monkeypatch: pytest.MonkeyPatch, free_bytes: int, **changes: Any) -> KvBudget:
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: free_bytes)
    sizes: dict[str, Any] = {
        "kv_cache_tokens": 0,
        "block_tokens": 16,
        "max_sequences": 2,
        "max_context_tokens": 100,
        "bytes_per_token": PER_TOKEN,
        "device": torch.device("cpu"),
        **changes,
    }
    return choose_budget(**sizes)


def test_bytes_of_a_token() -> None:
    # SmolLM2-135M: 30 layers, 3 key heads of 64, keys and values of 2 bytes.
    assert token_bytes([LayerShape(3, 64)] * 30, torch.bfloat16) == 23_040


def test_enough_memory_gives_every_sequence_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = choose(monkeypatch, 1024 * MIB)
    # 100 tokens are 7 blocks of 16.
    assert (budget.num_blocks, budget.tokens, budget.limited_by) == (14, 224, "max_sequences")


def test_a_quarter_of_free_memory_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    # A quarter of 5 MiB holds ten blocks of 128 KiB.
    budget = choose(monkeypatch, 5 * MIB)
    assert (budget.num_blocks, budget.limited_by) == (10, "memory")


def test_a_configured_cache_is_rounded_down_to_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = choose(monkeypatch, 1024 * MIB, kv_cache_tokens=1000)
    assert (budget.num_blocks, budget.limited_by) == (62, "kv_cache_tokens")


def test_a_configured_cache_may_take_all_that_is_free_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, 10 * MIB, kv_cache_tokens=1280).num_blocks == 80
    with pytest.raises(ConfigError, match=r"1280 tokens need 10\.0 MiB, 9\.99 MiB are free"):
        choose(monkeypatch, 10 * MIB - 10_000, kv_cache_tokens=1280)


def test_not_even_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_tokens: 0\.1 of 0\.4 MiB"):
        choose(monkeypatch, int(0.4 * MIB))


def test_cuda_takes_its_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * MIB, 200 * MIB))
    budget = choose(monkeypatch, 0, device=torch.device("cuda"), max_sequences=100)
    # 85 MiB in blocks of 128 KiB.
    assert (budget.num_blocks, budget.limited_by) == (680, "memory")
    with pytest.raises(ConfigError, match=r"100\.0 MiB are free on cuda"):
        choose(monkeypatch, 0, device=torch.device("cuda"), kv_cache_tokens=16_000)


def test_the_runner_states_its_budget_and_refuses(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("llama_gqa_tied")
    # 3 layers, 2 key heads of 8, keys and values, 4 bytes: 384 bytes a token.
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: 3 * MIB)
    with structlog.testing.capture_logs() as logs:
        runner = TorchRunner(folder, dtype="float32", device="cpu", max_sequences=64)
    line = next(entry for entry in logs if entry["event"] == "kv_cache")
    assert line == {
        "event": "kv_cache",
        "module": "paceline.engine.kv_cache",
        "log_level": "info",
        "blocks": 128,
        "block_tokens": 16,
        "tokens": 2048,
        "mib": 0.75,
        "free_mib": 3.0,
        "limited_by": "memory",
    }
    assert runner.num_blocks == 128
    # 8193 tokens round down to 512 blocks of 6 KiB: 3 MiB, as much as there is.
    assert TorchRunner(folder, dtype="float32", device="cpu", kv_cache_tokens=8193).num_blocks == 512
    with pytest.raises(ConfigError, match=r"kv_cache_tokens: 8208 tokens need 3\.01 MiB, 3\.0 MiB are free"):
        TorchRunner(folder, dtype="float32", device="cpu", kv_cache_tokens=8208)


def memory_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Only these files of the kernel's exist."""

    def read(path: Path, *_: Any, **__: Any) -> str:
        if str(path) not in files:
            raise FileNotFoundError(str(path))
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)


MEMINFO = {"/proc/meminfo": "MemTotal:  9000 kB\nMemFree:  1000 kB\nMemAvailable:  5000 kB\n"}
GROUP = "/sys/fs/cgroup/memory."


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, 5000 * 1024),
        ("max", 5000 * 1024),
        ("100000000", 5000 * 1024),
        ("4000000", 4_000_000 - (3_000_000 - 700_000)),
        ("1000000", 0),
    ],
)
def test_memory_at_hand_is_the_machines_or_the_containers(
    monkeypatch: pytest.MonkeyPatch, limit: str | None, expected: int
) -> None:
    files = dict(MEMINFO)
    if limit is not None:
        files[GROUP + "max"] = f"{limit}\n"
        files[GROUP + "current"] = "3000000\n"
        files[GROUP + "stat"] = "anon 2000000\nactive_file 300000\ninactive_file 700000\n"
    memory_files(monkeypatch, files)
    assert kv_cache.available_memory_bytes() == expected


def test_half_the_machine_where_the_kernel_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_files(monkeypatch, {})
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    assert kv_cache.available_memory_bytes() == 2_048_000


def test_a_verifier_that_cannot_hold_its_cache_does_not_start(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its exit code is 3, and the reason names the setting and both sizes: 192 bytes a token in bf16."""
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", "serve", "verifier", "--run-dir", str(tmp_path)],
        env={
            **os.environ,
            "PACELINE_MODEL__TARGET": str(tiny("llama_gqa_tied")),
            "PACELINE_ENGINE__DEVICE": "cpu",
            "PACELINE_ENGINE__KV_CACHE_TOKENS": str(2**40),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    reason = next(line["reason"] for line in lines if line["event"] == "start_failed")
    assert "kv_cache_tokens" in reason
    assert f"{2**40} tokens need 201326592.0 MiB, " in reason
