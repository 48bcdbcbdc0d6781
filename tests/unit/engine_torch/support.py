"""Tiny models with random weights, and a scheduler for tests that hands a runner plans made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from paceline.core.sampling import accepted_length
from paceline.core.types import SamplingParams
from paceline.engine.runner import TorchRunner
from paceline.engine.step import ItemResult, StepItem, StepPlan
from paceline.engine.step import Sequence as EngineSequence

VOCAB = 257
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_gqa_tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama_mha_untied": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 3}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "sliding_window": None}),
    "gpt_neox": ("GPTNeoX", {}),
    "qwen3_moe": ("Qwen3Moe", {"num_key_value_heads": 2, **_MOE}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "sliding_window": None, **_MOE}),
}


def make_config(family: str, **changes: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**{**_COMMON, **changes})


def save_model(folder: Path, family: str, **changes: Any) -> Path:
    """A random fp32 model with the smallest tokenizer.json that passes."""
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(make_config(family, **changes))
    model.save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Gives every sequence its blocks at once: neighbouring ones, or scattered."""

    def __init__(self, runner: TorchRunner, *, scattered: bool = False) -> None:
        self.runner = runner
        self._free = list(range(runner.num_blocks))
        if scattered:
            Random(3).shuffle(self._free)
        self._next_id = 0

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        room_tokens: int = 64,
        noise_key: int = 11,
        stop_ids: frozenset[int] = frozenset(),
    ) -> EngineSequence:
        count = -(-(len(prompt) + room_tokens) // self.runner.block_tokens)
        blocks, self._free = self._free[:count], self._free[count:]
        self._next_id += 1
        return EngineSequence(
            id=self._next_id,
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            params=params,
            noise_key=noise_key,
            stop_ids=stop_ids,
            blocks=blocks,
        )

    def step(
        self,
        sequences: Sequence[EngineSequence],
        drafts: Mapping[int, Sequence[int]] | None = None,
        chunk_tokens: int = 1000,
    ) -> list[ItemResult]:
        """One step: prefill chunks, or verification of drafts; commits what was accepted."""
        items = []
        for sequence in sequences:
            pending = sequence.tokens[sequence.computed :]
            if len(pending) > chunk_tokens:
                items.append(item_of(sequence, tuple(pending[:chunk_tokens]), (), 0))
            else:
                draft = tuple((drafts or {}).get(sequence.id, ()))
                items.append(item_of(sequence, (*pending, *draft), draft, len(draft) + 1))
        results = self.runner.execute(StepPlan(tuple(items)))
        for item, result in zip(items, results, strict=True):
            sequence = item.sequence
            if not item.samples:
                sequence.computed += len(item.token_ids)
            elif result.error is None:
                accepted = accepted_length(item.draft, result.chosen)
                sequence.computed = item.start + len(item.token_ids) - len(item.draft) + accepted
                sequence.tokens.extend(result.chosen[: accepted + 1])
        return results


def item_of(
    sequence: EngineSequence, token_ids: tuple[int, ...], draft: tuple[int, ...], samples: int
) -> StepItem:
    return StepItem(sequence, sequence.computed, token_ids, draft, samples)


def output(sequence: EngineSequence) -> list[int]:
    return sequence.tokens[sequence.prompt_tokens :]
