"""The torch runner: one ragged forward pass a step, then the choice of tokens."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch
from torch import Tensor

from paceline.engine.forward import Forward, RaggedForward
from paceline.engine.invariant import InvariantForward
from paceline.engine.kv_cache import KvCache, choose_budget, token_bytes
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
        exact: one seed gives the same bytes whatever the batch and the drafts. In fp32 that holds up to ties
            within rounding; 16-bit dtypes get passes of one shape (see `invariant`), checked here.
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
        exact: bool = False,
        slowdown: float = 1.0,
    ) -> None:
        if threads > 0:
            torch.set_num_threads(threads)
        files = _files(model)
        invariant = exact and dtype != "float32"
        loaded = load_model(files.path, dtype=dtype, device=device, experts_by_token=invariant)
        self.vocab_size = files.vocab_size
        self.max_context_tokens = files.max_context_tokens
        self.eos_token_ids = files.eos_token_ids
        self.block_tokens = block_tokens
        budget = choose_budget(
            kv_cache_tokens=kv_cache_tokens,
            block_tokens=block_tokens,
            max_sequences=max_sequences,
            max_context_tokens=files.max_context_tokens,
            bytes_per_token=token_bytes(loaded.layers, loaded.dtype),
            device=loaded.device,
        )
        budget.state()
        self.num_blocks = budget.num_blocks
        self.slowdown = slowdown
        self.device = str(loaded.device)
        self.dtype = dtype
        cache = KvCache(
            loaded.layers,
            num_blocks=self.num_blocks,
            block_tokens=block_tokens,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        self._forward: Forward = RaggedForward(loaded, cache)
        if invariant:
            self._forward = checked = InvariantForward(loaded, cache)
            with torch.inference_mode():
                checked.check()
        self._sampler = Sampler(files.vocab_size, loaded.device)
        self._failing: set[int] = set()

    def execute(self, plan: StepPlan) -> list[ItemResult]:
        """One step, blocking; results in the order of ``plan.items``."""
        if not plan.items:
            return []
        started = time.perf_counter()
        with torch.inference_mode():
            logits = self._forward.logits(plan.items)
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
        del self._forward, self._sampler
        gc.collect()

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
