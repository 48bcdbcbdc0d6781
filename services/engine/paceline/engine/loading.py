"""Loads a Hugging Face causal language model, and refuses at once what paged attention cannot compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from paceline.core.errors import ConfigError
from paceline.engine.attention import IMPLEMENTATION, ProbeStep, attending
from paceline.engine.kv_cache import LayerShape

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for ragged steps.

    Args:
        module: called as ``module(input_ids=, position_ids=, use_cache=False, logits_to_keep=)``.
        layers: shape of keys and values, by layer.
        group: query heads for each key head.
    """

    module: Any
    layers: tuple[LayerShape, ...]
    group: int
    dtype: torch.dtype
    device: torch.device


def choose_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is one; raises ConfigError for a device that is absent."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device: {device!r} is not a torch device ({error})") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: {device!r} asked for, but torch finds no CUDA device")
    return chosen


def load_model(path: Path, *, dtype: str, device: str, experts_by_token: bool = False) -> LoadedModel:
    """Loads the weights in ``path``.

    Args:
        experts_by_token: a mixture of experts computes each token on its own, so that its result does not
            depend on how many others chose the same expert; slow beyond tiny models.

    Raises:
        ConfigError: unknown dtype or device, unreadable weights, or an architecture with attention that is
            not plain causal attention in every layer.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    target = choose_device(device)
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {path}: config cannot be read: {error}") from error
    if reason := unsupported(config):
        raise ConfigError(f"model {path} ({config.model_type}): {reason}")
    try:
        if experts_by_token:
            # As from_pretrained does with its argument of that name, which plain models do not take.
            config._experts_implementation = "batched_mm"
        module = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=DTYPES[dtype], attn_implementation=IMPLEMENTATION
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model {path}: weights cannot be loaded: {error}") from error
    module = module.to(target).eval().requires_grad_(False)
    return _probed(module, config, path, DTYPES[dtype], target)


def unsupported(config: Any) -> str | None:
    """Why a configuration cannot be served, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models are not supported"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention is not supported"
    if getattr(config, "attn_logit_softcapping", None):
        return "attention soft-capping is not supported"
    kinds = set(getattr(config, "layer_types", None) or ())
    window = _active_window(config)
    if other := kinds - {"full_attention"} - (set() if window else {"sliding_attention"}):
        return f"layers of type {', '.join(sorted(other))} are not supported"
    if window and not kinds:
        return f"a sliding window of {window} tokens below the context length is not supported"
    return None


def _active_window(config: Any) -> int | None:
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    return int(window) if window < config.max_position_embeddings else None


def _probed(module: Any, config: Any, path: Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Runs one token through the model to learn what its layers ask of attention."""
    probe = ProbeStep()
    zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    with torch.inference_mode(), attending(probe):
        module(input_ids=zero, position_ids=zero, use_cache=False, logits_to_keep=1)
    if reason := _objection(probe, config, list(module.modules())):
        raise ConfigError(f"model {path} ({config.model_type}): {reason}")
    layers = tuple(probe.layers[i] for i in range(len(probe.layers)))
    return LoadedModel(module, layers, probe.group, dtype, device)


def _objection(probe: ProbeStep, config: Any, modules: Sequence[torch.nn.Module]) -> str | None:
    expected = config.num_hidden_layers
    if probe.calls != expected or sorted(probe.layers) != list(range(expected)):
        return f"only {probe.calls} of {expected} layers use plain attention; others are not supported"
    if any(getattr(module, "is_causal", True) is False for module in modules):
        return "non-causal attention is not supported"
    if probe.key_dims != probe.value_dims:
        return "keys and values of different sizes are not supported"
    if len(set(probe.layers.values())) > 1:
        return "layers with unlike key heads are not supported"
    window = probe.options.get("sliding_window")
    if window is not None and window < config.max_position_embeddings:
        return f"a sliding window of {window} tokens is not supported"
    for option, name in (("softcap", "attention soft-capping"), ("s_aux", "attention sinks")):
        if probe.options.get(option) is not None:
            return f"{name} is not supported"
    return None
