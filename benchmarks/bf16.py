"""What bf16 does to bytes and time: tokens that differ between 1 and 5 query tokens, and `exact` in bf16.

Protocol: a text is sampled at temperature 0.8 for each prompt; every way of computing then meets the same
texts, position by position (teacher forcing), and is compared with single-token steps of one sequence alone.
Flips are positions whose token differs, greedy and sampled with one noise; TV is the mean total variation
distance of the two distributions at temperature 1, beside the distance of each from the fp32 model.
Step times are medians of interleaved steps. Prints tables and, with ``--json``, writes all figures.

    .venv/bin/python benchmarks/bf16.py --prompts FILE.jsonl [--count 16] [--tokens 48] [--json OUT.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer

import paceline.engine  # noqa: F401 - before torch: how its threads wait
from paceline.core.noise import Domain, noise_key
from paceline.core.types import SamplingParams
from paceline.engine.runner import TorchRunner
from paceline.engine.sampler import Sampler
from paceline.engine.step import Sequence as EngineSequence
from paceline.engine.step import StepItem, StepPlan
from paceline.wire.models import locate

sys.path.insert(0, str(Path(__file__).resolve().parent))
from exactness import read_prompts

MODEL = "smollm2-135m-instruct"
BLOCK_TOKENS = 16
PROMPT_TOKENS = 96
PARAMS = SamplingParams(temperature=0.8)
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "bf16 exact": {"dtype": "bfloat16", "exact": True},
    "fp32 exact": {"dtype": "float32", "exact": True},
}


def make_texts(prompts: Sequence[Sequence[int]], room_tokens: int) -> list[EngineSequence]:
    """One sequence for each prompt, with blocks of its own; the block tables fit every runner here."""
    texts = []
    block = 0
    for i, prompt in enumerate(prompts):
        count = -(-(len(prompt) + room_tokens) // BLOCK_TOKENS)
        key = noise_key(i, 0, list(prompt), Domain.TARGET)
        text = EngineSequence(i, list(prompt), len(prompt), PARAMS, key)
        text.blocks = list(range(block, block + count))
        block += count
        texts.append(text)
    return texts


def prefill(runner: TorchRunner, texts: Sequence[EngineSequence]) -> None:
    """All prompt tokens but the last, which the first step feeds."""
    for text in texts:
        tokens = tuple(text.tokens[: text.prompt_tokens - 1])
        runner.execute(StepPlan((StepItem(text, 0, tokens, (), 0),)))
        text.computed = len(tokens)


def sample(runner: TorchRunner, texts: Sequence[EngineSequence], count: int) -> None:
    for text in texts:
        for _ in range(count):
            (result,) = runner.execute(StepPlan((next_item(text, 1),)))
            text.tokens += result.chosen
            text.computed += 1


def next_item(text: EngineSequence, width: int) -> StepItem:
    """The next ``width`` tokens of a text, those after the first as its draft."""
    tokens = tuple(text.tokens[text.computed : text.computed + width])
    return StepItem(text, text.computed, tokens, tokens[1:], len(tokens))


def forced_logits(
    runner: TorchRunner, texts: Sequence[EngineSequence], width: int, batched: bool
) -> list[Tensor]:
    """Logits ``[positions, vocabulary]`` of each text, ``width`` query tokens of a sequence a step.

    A text's last token is not fed, since nothing is compared after it.
    """
    parts: list[list[Tensor]] = [[] for _ in texts]
    groups = [list(range(len(texts)))] if batched else [[i] for i in range(len(texts))]
    prefill(runner, texts)
    for group in groups:
        while left := len(texts[group[0]].tokens) - 1 - texts[group[0]].computed:
            items = [next_item(texts[i], min(width, left)) for i in group]
            with torch.inference_mode():
                rows = runner._forward.logits(items)
            for i, item in zip(group, items, strict=True):
                parts[i].append(rows[: item.samples].clone())
                rows = rows[item.samples :]
                texts[i].computed += item.samples
    return [torch.cat(part) for part in parts]


def chosen(texts: Sequence[EngineSequence], logits: Sequence[Tensor], vocab_size: int) -> list[int]:
    sampler = Sampler(vocab_size, torch.device("cpu"))
    tokens: list[int] = []
    for text, rows in zip(texts, logits, strict=True):
        start = text.prompt_tokens - 1
        ids = tuple(text.tokens[start : start + rows.shape[0]])
        (result,) = sampler.choose([StepItem(text, start, ids, ids[1:], len(ids))], rows.clone())
        tokens += result.chosen
    return tokens


def compare(
    texts: Any, ours: list[Tensor], base: list[Tensor], fp32: list[Tensor], vocab: int
) -> dict[str, Any]:
    a, b, reference = torch.cat(ours), torch.cat(base), torch.cat(fp32)
    sampled = [x != y for x, y in zip(chosen(texts, ours, vocab), chosen(texts, base, vocab), strict=True)]
    return {
        "positions": a.shape[0],
        "greedy_flips": (a.argmax(1) != b.argmax(1)).float().mean().item(),
        "sampled_flips": sum(sampled) / len(sampled),
        "different_rows": (a != b).any(1).float().mean().item(),
        "tv": tv(a, b),
        "tv_from_fp32": tv(a, reference),
    }


def tv(a: Tensor, b: Tensor) -> float:
    parts = zip(torch.split(a, 64), torch.split(b, 64), strict=True)
    return sum(float((x.softmax(1) - y.softmax(1)).abs().sum()) / 2 for x, y in parts) / a.shape[0]


def step_times(runners: dict[str, TorchRunner], repeats: int = 7) -> dict[str, dict[str, float]]:
    """Median milliseconds of steps at 200 tokens of context, and of a prefill of 256 tokens; ways in turn."""
    cases = {"step_1x1_ms": (1, 1), "step_1x5_ms": (1, 5), "step_16x1_ms": (16, 1), "step_16x5_ms": (16, 5)}
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in runners}
    texts = make_texts([[100 + i] * 201 for i in range(16)], 16)
    for runner in runners.values():
        prefill(runner, texts)
    for _ in range(repeats):
        for name, runner in runners.items():
            for case, (count, width) in cases.items():
                draft = (7,) * (width - 1)
                items = [StepItem(text, 200, (7, *draft), draft, width) for text in texts[:count]]
                samples[name].setdefault(case, []).append(timed(runner, items))
            item = StepItem(texts[0], 0, (5,) * 200, (), 1)
            samples[name].setdefault("prefill_200_ms", []).append(timed(runner, [item]))
    return {n: {c: statistics.median(v) for c, v in of_way.items()} for n, of_way in samples.items()}


def timed(runner: TorchRunner, items: Sequence[StepItem]) -> float:
    began = time.perf_counter()
    runner.execute(StepPlan(tuple(items)))
    return (time.perf_counter() - began) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    files = locate(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(files.path)
    texts = read_prompts(arguments.prompts, arguments.count)
    prompts = [tokenizer(text)["input_ids"][:PROMPT_TOKENS] for text in texts]
    common: dict[str, Any] = {"device": "cpu", "kv_cache_tokens": 8192, "block_tokens": BLOCK_TOKENS}
    runners = {name: TorchRunner(files, **common, **way) for name, way in WAYS.items()}
    own = make_texts(prompts, arguments.tokens + 1)
    prefill(runners["bf16"], own)
    sample(runners["bf16"], own, arguments.tokens)
    vocab = files.vocab_size

    def logits(way: str, width: int, batched: bool) -> list[Tensor]:
        print(f"{way}: {width} query tokens, {'batch' if batched else 'alone'}", file=sys.stderr)
        return forced_logits(runners[way], own, width, batched)

    fp32 = logits("fp32 exact", 1, False)
    figures: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        base = fp32 if way == "fp32 exact" else logits(way, 1, False)
        figures[f"{way}: 1 token, alone (base)"] = compare(own, base, base, fp32, vocab)
        for width, batched in ((5, False), (1, True), (5, True)):
            name = f"{way}: {width} token{'s' if width > 1 else ''}, {'batch of 16' if batched else 'alone'}"
            figures[name] = compare(own, logits(way, width, batched), base, fp32, vocab)
    times = step_times(runners)
    console = Console(width=130)
    columns = ("positions", "greedy flips", "sampled flips", "rows that differ", "TV", "TV from fp32")
    table = Table("against single-token steps alone", *columns)
    for name, f in figures.items():
        table.add_row(
            name, str(f["positions"]), f"{f['greedy_flips']:.2%}", f"{f['sampled_flips']:.2%}",
            f"{f['different_rows']:.1%}", f"{f['tv']:.5f}", f"{f['tv_from_fp32']:.5f}",
        )  # fmt: skip
    console.print(table)
    cases = list(next(iter(times.values())))
    table = Table("median", *cases)
    for name, row in times.items():
        table.add_row(name, *(f"{row[case]:.1f}" for case in cases))
    console.print(table)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"flips": figures, "times": times}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
