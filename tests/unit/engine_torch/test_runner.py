"""Steps of the torch runner against transformers' own generation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engine_torch_support import ARCHITECTURES, GREEDY, VOCAB, Driver, item_of, output
from transformers import AutoModelForCausalLM

from paceline.core.types import SamplingParams
from paceline.engine.runner import TorchRunner
from paceline.engine.step import StepPlan
from paceline.wire.models import ModelFiles

NEW_TOKENS = 24


def prompts(seed: int = 1) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(1, VOCAB) for _ in range(n)] for n in (37, 5, 18)]


def reference(model: Any, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """Greedy ids by transformers' generate with eager attention, end-of-sequence ignored."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return ids[0, len(prompt) :].tolist()


def eager(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.parametrize("scattered", [False, True])
def test_ragged_greedy_equals_generate(tiny: Callable[[str], Path], name: str, scattered: bool) -> None:
    """Chunked prefill, sequences joining late, right and wrong drafts with rollback."""
    folder = tiny(name)
    model = eager(folder)
    expected = [reference(model, prompt) for prompt in prompts()]
    runner = TorchRunner(folder, dtype="float32", device="cpu", kv_cache_tokens=512)
    driver = Driver(runner, scattered=scattered)
    sequences = [driver.add(prompt) for prompt in prompts()]

    random = Random(5)
    running = sequences[:1]
    for step in range(200):
        if step == 2:
            running = sequences
        drafts = {}
        for sequence, tokens in zip(sequences, expected, strict=True):
            done = len(output(sequence))
            draft = tokens[done : done + random.randrange(5)][: NEW_TOKENS - done - 1]
            if draft and random.random() < 0.5:
                wrong = random.randrange(len(draft))
                draft[wrong] = (draft[wrong] + 1) % VOCAB
            drafts[sequence.id] = draft
        running = [s for s in running if len(output(s)) < NEW_TOKENS]
        if not running and step > 2:
            break
        driver.step(running, drafts, chunk_tokens=16)
    assert [output(s) for s in sequences] == expected
    assert step < NEW_TOKENS  # drafts were accepted: fewer steps than tokens


def test_logprobs_are_raw_and_top_ones_are_sorted(tiny: Callable[[str], Path]) -> None:
    folder = tiny("llama_gqa_tied")
    prompt = prompts()[0]
    params = SamplingParams(temperature=0.0, logprobs=3, repetition_penalty=1.7, logit_bias={3: 50.0})
    runner = TorchRunner(folder, dtype="float32", device="cpu", kv_cache_tokens=256)
    driver = Driver(runner)
    sequence = driver.add(prompt, params)
    (result,) = driver.step([sequence])
    assert result.chosen == [3]
    with torch.inference_mode():
        logits = eager(folder)(torch.tensor([prompt])).logits[0, -1]
    expected = torch.log_softmax(logits, 0)
    assert result.logprobs is not None
    (logprobs,) = result.logprobs
    assert logprobs.logprob == pytest.approx(expected[3].item(), abs=1e-4)
    values, ids = expected.topk(3)
    assert [i for i, _ in logprobs.top] == ids.tolist()
    assert [v for _, v in logprobs.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_failing_sequence_leaves_the_others_alone(tiny: Callable[[str], Path]) -> None:
    runner = TorchRunner(tiny("qwen2"), dtype="float32", device="cpu", kv_cache_tokens=512)
    driver = Driver(runner)
    alone = driver.add(prompts()[1])
    (expected,) = driver.step([alone])
    bad, good = driver.add(prompts()[0]), driver.add(prompts()[1])
    runner.fail_next(bad.id)
    failed, fine = driver.step([bad, good])
    assert failed.error is not None
    assert failed.chosen == []
    assert fine.error is None
    assert fine.chosen == expected.chosen
    (again,) = driver.step([bad])
    assert again.error is None


def test_a_step_without_samples_chooses_nothing(tiny: Callable[[str], Path]) -> None:
    runner = TorchRunner(tiny("gpt_neox"), dtype="float32", device="cpu", kv_cache_tokens=256)
    sequence = Driver(runner).add(prompts()[0])
    (result,) = runner.execute(StepPlan((item_of(sequence, tuple(sequence.tokens[:8]), (), 0),)))
    assert (result.chosen, result.margins, result.error) == ([], [], None)
    assert runner.execute(StepPlan(())) == []


def test_sampled_tokens_do_not_depend_on_drafts_or_batch(tiny: Callable[[str], Path]) -> None:
    """Coupled sampling: one key gives the same tokens verified or decoded plainly, alone or in a batch."""
    runner = TorchRunner(tiny("qwen3"), dtype="float32", device="cpu", kv_cache_tokens=1024)
    params = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.4)
    driver = Driver(runner)
    plain = driver.add(prompts()[0], params, noise_key=99)
    for _ in range(NEW_TOKENS):
        driver.step([plain])
    drafted, other = driver.add(prompts()[0], params, noise_key=99), driver.add(prompts()[1])
    random = Random(2)
    while len(output(drafted)) < NEW_TOKENS:
        done = len(output(drafted))
        draft = output(plain)[done : done + 4][: NEW_TOKENS - done - 1]
        if len(draft) > 2 and random.random() < 0.5:
            draft[2] = (draft[2] + 1) % VOCAB
        driver.step([other, drafted], {drafted.id: draft}, chunk_tokens=8)
    assert output(drafted) == output(plain)


def test_bfloat16_and_cache_size(tiny: Callable[[str], Path]) -> None:
    runner = TorchRunner(tiny("llama_mha_untied"), device="cpu", max_sequences=2)
    assert runner.num_blocks == 2 * 256 // 16
    driver = Driver(runner)
    sequence = driver.add(prompts()[0])
    for _ in range(4):
        driver.step([sequence])
    assert len(output(sequence)) == 4
    runner.close()


def test_smollm_equals_generate(smollm: ModelFiles) -> None:
    model = eager(smollm.path)
    runner = TorchRunner(smollm, dtype="float32", device="cpu", kv_cache_tokens=2048)
    driver = Driver(runner)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm.tokenizer_json))
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n",
        "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    ]
    encoded = [tokenizer.encode(text).ids for text in texts]
    expected = [reference(model, ids, 32) for ids in encoded]
    sequences = [driver.add(ids, GREEDY) for ids in encoded]
    while running := [s for s in sequences if len(output(s)) < 32]:
        drafts = {}
        for sequence, tokens in zip(sequences, expected, strict=True):
            done = len(output(sequence))
            drafts[sequence.id] = tokens[done : done + 4][: 32 - done - 1]
        driver.step(running, drafts)
    assert [output(s) for s in sequences] == expected
