"""Stacks that several system tests share; each is started once."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# importlib import mode keeps test folders off sys.path; the helper module is loaded by path.
_spec = importlib.util.spec_from_file_location("system_stack", Path(__file__).with_name("stack.py"))
if _spec is None or _spec.loader is None:
    raise ImportError("tests/system/stack.py")
system_stack = importlib.util.module_from_spec(_spec)
sys.modules["system_stack"] = system_stack
_spec.loader.exec_module(system_stack)

TARGET = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def exact_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The real model in exact mode with the n-gram drafter."""
    run_dir = tmp_path_factory.mktemp("stack") / "exact"
    with system_stack.running(run_dir, {"engine.exact": True, "engine.integrity_check": True}) as stack:
        yield stack


@pytest.fixture(scope="session")
def null_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Null engines: the whole path without a model's compute."""
    run_dir = tmp_path_factory.mktemp("stack") / "null"
    settings = {"engine.engine": "null", "drafters": [{"id": "d0", "kind": "null"}]}
    with system_stack.running(run_dir, settings) as stack:
        yield stack


@pytest.fixture(scope="session")
def generate() -> Any:
    """transformers' own greedy ``generate`` of one chat prompt in fp32: token ids of the answer."""
    import torch
    from paceline.wire.models import locate
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = locate(TARGET).path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)

    def answer(content: str, max_tokens: int) -> list[int]:
        messages = [{"role": "user", "content": content}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=max_tokens, do_sample=False)
        tokens: list[int] = out[0, ids["input_ids"].shape[1] :].tolist()
        return tokens

    return answer
