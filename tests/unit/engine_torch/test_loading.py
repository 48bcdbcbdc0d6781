"""What the engine refuses at load, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_torch_support import make_config, save_model

from paceline.core.errors import ConfigError
from paceline.engine.kv_cache import KvCache, LayerShape
from paceline.engine.loading import choose_device, load_model, unsupported
from paceline.engine.runner import TorchRunner


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("Mistral", {"num_key_value_heads": 2, "sliding_window": 32}, "sliding"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, "sliding"),
        ("Gemma2", {"num_key_value_heads": 2, "head_dim": 8}, "soft-capping"),
        ("DeepseekV3", {}, "latent"),
        ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}, None),
    ],
)
def test_configurations(family: str, changes: dict[str, Any], reason: str | None) -> None:
    problem = unsupported(make_config(family, **changes))
    if reason is None:
        assert problem is None
    else:
        assert problem is not None
        assert reason in problem


def test_an_active_window_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    make_config("Mistral", num_key_value_heads=2, sliding_window=32).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="sliding window of 32 tokens"):
        load_model(tmp_path, dtype="float32", device="cpu")


def test_a_window_as_long_as_the_context_is_served(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "Mistral", num_key_value_heads=2, sliding_window=256)
    assert load_model(folder, dtype="float32", device="cpu").group == 3


def test_layers_without_plain_attention_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "Mamba", state_size=4)
    with pytest.raises(ConfigError, match="not supported"):
        load_model(folder, dtype="float32", device="cpu")


def test_encoder_decoder_is_refused() -> None:
    assert "encoder-decoder" in (unsupported(SimpleNamespace(is_encoder_decoder=True)) or "")


def test_missing_and_broken_weights(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config cannot be read"):
        load_model(tmp_path, dtype="float32", device="cpu")
    source = tiny("qwen2")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="weights cannot be loaded"):
        load_model(tmp_path, dtype="float32", device="cpu")
    weights = (source / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ConfigError, match="weights cannot be loaded"):
        load_model(tmp_path, dtype="float32", device="cpu")


def test_dtype_and_device_are_checked(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        TorchRunner(tiny("qwen2"), dtype="int8")
    with pytest.raises(ConfigError, match="device"):
        choose_device("no such device")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA"):
            choose_device("cuda")


def test_cache_slots_follow_the_block_table() -> None:
    cache = KvCache(
        [LayerShape(2, 8)], num_blocks=10, block_tokens=4, dtype=torch.float32, device=torch.device("cpu")
    )
    assert cache.slots([7, 2], 2, 6).tolist() == [30, 31, 8, 9]
    assert cache.run([7, 2], 6) is None
    assert cache.run([7, 2], 4) == 28
    assert cache.run([3, 4, 5], 12) == 12
    assert cache.run([3, 5, 5], 12) is None
