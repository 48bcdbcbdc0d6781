"""The torch runner: one ragged forward pass a step, then the choice of tokens."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch
from torch import Tensor

from paceline.engine.attention import PagedStep, attending
from paceline.engine.kv_cache import KvCache, choose_num_blocks, token_bytes
from paceline.engine.loading import load_model
from paceline.engine.sampler import Sampler
from paceline.engine.step import ItemResult, StepItem, StepPlan
from paceline.wire.models import ModelFiles, locate, read_model


class TorchRunner:
    """Computes steps with a Hugging Face causal language model; implements `step.Runner`.

    Args:
        model: files from `wire.models.locate`, or a folder, or anything `locate` takes.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        device: ``auto`` (CUDA if there is one), or a torch device.
        threads: torch threads; 0 leaves torch's default, one for each core.
        max_sequences: with ``kv_cache_tokens`` 0 the cache holds so many full contexts, memory permitting.
        kv_cache_tokens: size of the cache; 0 chooses it.
        slowdown: every step is made to take this many times as long; may be set at run time.

    Raises:
        ConfigError: the model is absent, broken or not supported, or memory does not hold its cache.
    """

    def __init__(
        self,
        model: ModelFiles | Path | str,
        *,
        dtype: str = "bfloat16",
        device: str = "auto",
        threads: int = 0,
        max_sequences: int = 64,
        kv_cache_tokens: int = 0,
        block_tokens: int = 16,
        slowdown: float = 1.0,
    ) -> None:
        if threads > 0:
            torch.set_num_threads(threads)
        files = _files(model)
        loaded = load_model(files.path, dtype=dtype, device=device)
        self.vocab_size = files.vocab_size
        self.max_context_tokens = files.max_context_tokens
        self.eos_token_ids = files.eos_token_ids
        self.block_tokens = block_tokens
        self.num_blocks = choose_num_blocks(
            kv_cache_tokens=kv_cache_tokens,
            block_tokens=block_tokens,
            max_sequences=max_sequences,
            max_context_tokens=files.max_context_tokens,
            bytes_per_token=token_bytes(loaded.layers, loaded.dtype),
            device=loaded.device,
        )
        self.slowdown = slowdown
        self.device = str(loaded.device)
        self.dtype = dtype
        self._loaded = loaded
        self._cache = KvCache(
            loaded.layers,
            num_blocks=self.num_blocks,
            block_tokens=block_tokens,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        self._sampler = Sampler(files.vocab_size, loaded.device)
        self._failing: set[int] = set()

    def execute(self, plan: StepPlan) -> list[ItemResult]:
        """One step, blocking; results in the order of ``plan.items``."""
        if not plan.items:
            return []
        started = time.perf_counter()
        with torch.inference_mode():
            logits = self._forward(plan.items)
            self._spoil(plan.items, logits)
            results = self._sampler.choose(plan.items, logits)
        if self.slowdown > 1.0:
            time.sleep((self.slowdown - 1.0) * (time.perf_counter() - started))
        return results

    def fail_next(self, sequence_id: int) -> None:
        """Testing: the next logits of this sequence become NaN."""
        self._failing.add(sequence_id)

    def close(self) -> None:
        """Frees weights and cache; no step may follow."""
        del self._loaded, self._cache, self._sampler
        gc.collect()

    def _forward(self, items: tuple[StepItem, ...]) -> Tensor:
        """fp32 logits of all sampled positions, in the order of items."""
        loaded = self._loaded
        token_ids: list[int] = []
        positions: list[int] = []
        sampled: list[int] = []
        for item in items:
            token_ids.extend(item.token_ids)
            positions.extend(range(item.start, item.start + len(item.token_ids)))
            sampled.extend(range(len(token_ids) - item.samples, len(token_ids)))
        step = PagedStep(self._cache, items, group=loaded.group, dtype=loaded.dtype, device=loaded.device)
        with attending(step):
            output = loaded.module(
                input_ids=torch.tensor([token_ids], device=loaded.device),
                position_ids=torch.tensor([positions], device=loaded.device),
                use_cache=False,
                logits_to_keep=torch.tensor(sampled, dtype=torch.int64, device=loaded.device),
            )
        logits: Tensor = output.logits[0]
        return logits.float()

    def _spoil(self, items: tuple[StepItem, ...], logits: Tensor) -> None:
        begin = 0
        for item in items:
            if item.samples and item.sequence.id in self._failing:
                self._failing.discard(item.sequence.id)
                logits[begin : begin + item.samples] = float("nan")
            begin += item.samples


def _files(model: ModelFiles | Path | str) -> ModelFiles:
    if isinstance(model, ModelFiles):
        return model
    return read_model(model, str(model)) if isinstance(model, Path) else locate(model)
