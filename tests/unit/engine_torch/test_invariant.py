"""Exact mode in bf16: bits of a token's logits do not depend on batch, drafts, chunks or blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engine_torch_support import ARCHITECTURES, VOCAB, Driver, output
from transformers import AutoModelForCausalLM

from paceline.core.errors import ConfigError
from paceline.core.types import SamplingParams, TokenLogprobs
from paceline.engine import invariant
from paceline.engine.runner import TorchRunner
from paceline.engine.step import Sequence as EngineSequence
from paceline.wire.models import ModelFiles

NEW_TOKENS = 20
SAMPLING = SamplingParams(temperature=0.8, logprobs=20)
LONG = 150
"""Prompt tokens: more than one chunk of attention."""


def prompt(length: int, seed: int = 4) -> list[int]:
    random = Random(seed)
    return [random.randrange(1, VOCAB) for _ in range(length)]


class Recorder:
    """Steps one sequence, in company or not, and keeps the raw logprobs of what it committed."""

    def __init__(self, runner: TorchRunner, *, scattered: bool = False) -> None:
        self.driver = Driver(runner, scattered=scattered)
        self.logprobs: list[TokenLogprobs] = []

    def run(
        self,
        length: int,
        *,
        company: int = 0,
        chunk_tokens: int = 1000,
        drafts: Callable[[EngineSequence], Sequence[int]] = lambda _: (),
    ) -> list[int]:
        own = self.driver.add(prompt(length), SAMPLING, noise_key=5)
        others = [self.driver.add(prompt(11 + 3 * i, seed=i), SAMPLING, noise_key=i) for i in range(company)]
        while len(output(own)) < NEW_TOKENS:
            draft = list(drafts(own))[: NEW_TOKENS - len(output(own)) - 1]
            before = len(output(own))
            # Company comes and goes: other numbers of rows, and another row of its own, at each step.
            present = others[: len(own.tokens) % (company + 1)]
            results = self.driver.step([*present, own], {own.id: draft}, chunk_tokens)
            assert results[-1].error is None
            self.logprobs += (results[-1].logprobs or [])[: len(output(own)) - before]
        return output(own)


def runner_of(folder: Path | ModelFiles, *, exact: bool = True) -> TorchRunner:
    return TorchRunner(folder, dtype="bfloat16", device="cpu", kv_cache_tokens=2048, exact=exact)


def differing(folder: Path | ModelFiles, *, exact: bool, length: int) -> int:
    """Positions whose tokens or raw logprobs differ in any bit from the plain run's, over four conditions."""
    runner = runner_of(folder, exact=exact)
    plain = Recorder(runner)
    tokens = plain.run(length)
    random = Random(1)

    def right_or_wrong(sequence: EngineSequence) -> list[int]:
        done = len(output(sequence))
        draft = tokens[done : done + random.choice((0, 1, 3, 8))]
        if draft and random.random() < 0.4:
            draft[random.randrange(len(draft))] = random.randrange(VOCAB)
        return draft

    count = 0
    for condition in (
        {"drafts": right_or_wrong},
        {"company": 5},
        {"chunk_tokens": 5},
        {"company": 3, "chunk_tokens": 7, "drafts": right_or_wrong},
    ):
        other = Recorder(runner, scattered="company" in condition)
        arguments: dict[str, Any] = condition
        ids = other.run(length, **arguments)
        pairs = zip(ids, other.logprobs, tokens, plain.logprobs, strict=True)
        count += sum(a != b or x != y for a, x, b, y in pairs)
    return count


@pytest.mark.parametrize("length", [13, LONG])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_bits_are_the_same_under_all_conditions(tiny: Callable[[str], Path], name: str, length: int) -> None:
    assert differing(tiny(name), exact=True, length=length) == 0


def test_without_exact_bits_differ(tiny: Callable[[str], Path]) -> None:
    """The test above can fail: passes of any shape do not give the same bits."""
    assert sum(differing(tiny(name), exact=False, length=LONG) for name in ("qwen2", "mixtral")) > 0


@pytest.mark.parametrize("name", ["llama_gqa_tied", "gpt_neox", "qwen3_moe"])
def test_logits_are_those_of_the_model(tiny: Callable[[str], Path], name: str) -> None:
    """Against transformers in fp32 on the same bf16 weights: bf16 rounding apart, the same distribution."""
    folder = tiny(name)
    tokens = prompt(LONG)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.inference_mode():
        expected = torch.log_softmax(model.float()(torch.tensor([tokens])).logits[0, -1], 0)
    runner = runner_of(folder)
    driver = Driver(runner)
    sequence = driver.add(tokens, SamplingParams(temperature=0.0, logprobs=20))
    (result,) = driver.step([sequence])
    assert result.logprobs is not None
    for token_id, logprob in result.logprobs[0].top:
        assert logprob == pytest.approx(expected[token_id].item(), abs=0.15)


def test_smollm_bits_are_the_same(smollm: ModelFiles) -> None:
    assert differing(smollm, exact=True, length=20) == 0


def test_a_machine_whose_rows_differ_is_refused(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = invariant.InvariantStep.attend

    def by_row(self: invariant.InvariantStep, *arguments: Any) -> torch.Tensor:
        attended = attend(self, *arguments)
        return attended + torch.arange(attended.shape[0], dtype=attended.dtype).view(-1, 1, 1) * 0.01

    monkeypatch.setattr(invariant.InvariantStep, "attend", by_row)
    with pytest.raises(ConfigError, match=r"exact: results of torch.bfloat16 on cpu depend on the row"):
        runner_of(tiny("qwen2"))
    # Without the promise nothing is checked.
    runner_of(tiny("qwen2"), exact=False)
