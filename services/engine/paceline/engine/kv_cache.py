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

_CPU_FRACTION = 0.25
"""Of the memory at hand: weights, activations and the other processes of a machine need the rest."""
_CUDA_FRACTION = 0.85


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


def choose_num_blocks(
    *,
    kv_cache_tokens: int,
    block_tokens: int,
    max_sequences: int,
    max_context_tokens: int,
    bytes_per_token: int,
    device: torch.device,
) -> int:
    """Blocks for ``kv_cache_tokens``; if that is 0, for every sequence's full context, memory permitting.

    Raises:
        ConfigError: not even one block fits.
    """
    if kv_cache_tokens > 0:
        return max(1, kv_cache_tokens // block_tokens)
    wanted = max_sequences * -(-max_context_tokens // block_tokens)
    budget_bytes = _budget_bytes(device)
    affordable = budget_bytes // (bytes_per_token * block_tokens)
    if affordable < 1:
        raise ConfigError(
            f"kv_cache_tokens: {budget_bytes >> 20} MiB are free for the KV cache, not enough for one block"
        )
    return min(wanted, affordable)


def _budget_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * _CUDA_FRACTION)
    return int(available_memory_bytes() * _CPU_FRACTION)


def available_memory_bytes() -> int:
    """Memory this process may still take: the machine's, or its container's if that has less."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available
    return max(0, min(available, limit - used))
