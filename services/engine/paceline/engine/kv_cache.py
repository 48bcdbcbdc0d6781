"""Paged keys and values of every layer, and how many blocks fit into memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.wire.telemetry import get_logger

_CPU_FRACTION = 0.25
"""Of the memory free with the weights loaded: activations and a machine's other processes need the rest."""
_CUDA_FRACTION = 0.85

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one layer for one token."""

    kv_heads: int
    head_dim: int


class KvCache:
    """Per layer one tensor of keys and one of values, ``[num_blocks * block_tokens, kv_heads, head_dim]``.

    Slot ``block * block_tokens + offset`` holds one token. Contents start undefined; only written slots are
    ever read.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        slots = num_blocks * block_tokens
        shapes = [(slots, layer.kv_heads, layer.head_dim) for layer in layers]
        self.keys: list[Tensor] = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self.values: list[Tensor] = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

    def slots(self, blocks: Sequence[int], start: int, end: int) -> NDArray[np.int64]:
        """Slots of positions ``start`` to ``end`` (exclusive) under a block table."""
        positions = np.arange(start, end, dtype=np.int64)
        table = np.asarray(blocks, dtype=np.int64)
        return table[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens

    def run(self, blocks: Sequence[int], end: int) -> int | None:
        """First slot if positions 0 to ``end`` lie in one row of slots, so that a view serves; else None."""
        first, used = blocks[0], -(-end // self.block_tokens)
        if blocks[used - 1] - first != used - 1:
            return None
        if any(block != first + i for i, block in enumerate(blocks[:used])):
            return None
        return first * self.block_tokens


def token_bytes(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    return sum(2 * layer.kv_heads * layer.head_dim for layer in layers) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KvBudget:
    """How large the cache is, and why.

    Args:
        limited_by: ``kv_cache_tokens`` (configured), ``max_sequences`` (every sequence has its full context),
            or ``memory``.
        bytes_free: what the device had to give when this was chosen, weights loaded.
    """

    num_blocks: int
    block_tokens: int
    bytes_per_token: int
    bytes_free: int
    limited_by: str

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.block_tokens

    def state(self) -> None:
        """Logs the one line by which an operator sees the budget."""
        _log.info(
            "kv_cache",
            blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            tokens=self.tokens,
            mib=_mib(self.tokens * self.bytes_per_token),
            free_mib=_mib(self.bytes_free),
            limited_by=self.limited_by,
        )


def choose_budget(
    *,
    kv_cache_tokens: int,
    block_tokens: int,
    max_sequences: int,
    max_context_tokens: int,
    bytes_per_token: int,
    device: torch.device,
) -> KvBudget:
    """Blocks for ``kv_cache_tokens``; if that is 0, for every sequence's full context, memory permitting.

    A cache that is configured may take all that is free, one chosen here a share of it.

    Raises:
        ConfigError: the configured cache, or even one block, needs more memory than is free.
    """
    block_bytes = bytes_per_token * block_tokens
    bytes_free, share = _free_bytes(device)
    if kv_cache_tokens > 0:
        num_blocks, limited_by = max(1, kv_cache_tokens // block_tokens), "kv_cache_tokens"
        if num_blocks * block_bytes > bytes_free:
            raise ConfigError(
                f"kv_cache_tokens: {kv_cache_tokens} tokens need {_mib(num_blocks * block_bytes)} MiB, "
                f"{_mib(bytes_free)} MiB are free on {device}"
            )
    else:
        wanted = max_sequences * -(-max_context_tokens // block_tokens)
        affordable = int(bytes_free * share) // block_bytes
        if affordable < 1:
            raise ConfigError(
                f"kv_cache_tokens: {_mib(bytes_free * share)} of {_mib(bytes_free)} MiB free on {device} are "
                f"for the KV cache, not enough for one block of {_mib(block_bytes)} MiB"
            )
        num_blocks = min(wanted, affordable)
        limited_by = "max_sequences" if wanted <= affordable else "memory"
    return KvBudget(num_blocks, block_tokens, bytes_per_token, bytes_free, limited_by)


def _mib(count_bytes: float) -> float:
    return round(count_bytes / 2**20, 2)


def _free_bytes(device: torch.device) -> tuple[int, float]:
    """Bytes free on a device, and the share of them that a cache sized here takes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], _CUDA_FRACTION
    return available_memory_bytes(), _CPU_FRACTION


def available_memory_bytes() -> int:
    """Memory this process may still take: the machine's, or its container's if that has less.

    What a container's files occupy in the page cache counts as free: the kernel gives it back first, and a
    model's weights, mapped from their file, would else be counted twice.
    """
    try:
        available = _field("/proc/meminfo", "MemAvailable:") * 1024
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        used -= _field(group / "memory.stat", "inactive_file")
    except (OSError, ValueError, StopIteration):
        return available
    return max(0, min(available, limit - used))


def _field(path: Path | str, name: str) -> int:
    """The number after ``name`` in a file of the kernel's with one field a line."""
    lines = Path(path).read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[:1] == [name])
