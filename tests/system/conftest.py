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
    """The real model in exact mode; k is fixed so that every answer is drafted."""
    run_dir = tmp_path_factory.mktemp("stack") / "exact"
    settings = {"engine.exact": True, "engine.integrity_check": True, "speculation.k": 4}
    with system_stack.running(run_dir, settings) as stack:
        yield stack


@pytest.fixture(scope="session")
def null_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Null engines: the whole path without a model's compute."""
    run_dir = tmp_path_factory.mktemp("stack") / "null"
    settings = {
        "engine.engine": "null",
        "drafters": [{"id": "d0", "kind": "null"}],
        "speculation.k": 4,
    }
    with system_stack.running(run_dir, settings) as stack:
        yield stack


@pytest.fixture(scope="session")
def timed_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A verifier of 20 ms a step and a drafter of 1 ms a token that agrees with it."""
    run_dir = tmp_path_factory.mktemp("stack") / "timed"
    settings = {
        "engine.engine": "timed",
        "drafters": [{"id": "d0", "kind": "timed"}],
        "testing.timed": {"verify_ms": 20.0, "draft_ms": 1.0},
    }
    with system_stack.running(run_dir, settings) as stack:
        yield stack


@pytest.fixture(scope="session")
def generate() -> Any:
    """transformers' own greedy ``generate`` of one chat prompt in fp32: token ids of the answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from paceline.wire.models import locate

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
