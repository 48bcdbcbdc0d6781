"""Counts tokens that differ from transformers' own ``generate``: drafting on, off, drafter killed midway.

Protocol: exact mode (fp32), greedy, each prompt as one chat message, one request at a time; the third pass
kills the drafter (kill -9) after a few tokens of every tenth answer. Also counts answers at temperature 0.8
that differ between drafting on and off. Prints one JSON object; exit code 1 if anything differs.

    .venv/bin/python benchmarks/exactness.py --prompts FILE.jsonl --count 40 --max-tokens 64
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "system"))

from stack import Stack, running, stream_chat, wait_until


def read_prompts(path: Path, count: int) -> list[str]:
    """``turns[0]`` or ``prompt`` of each line, evenly spread over the file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
    texts = [text for text in texts if len(text) < 4000]
    return texts[:: max(1, len(texts) // count)][:count]


def reference(max_tokens: int) -> Callable[[str], list[int]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import paceline.engine  # noqa: F401 - before torch: how its threads wait
    from paceline.wire.models import locate

    path = locate("smollm2-135m-instruct").path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)

    def generate(prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        tokens: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    return generate


def killed_midway(stack: Stack, prompt: str, max_tokens: int) -> list[int]:
    tokens: list[int] = []
    killed = 0
    for chunk in stream_chat(stack, prompt, temperature=0, max_tokens=max_tokens):
        for choice in chunk["choices"]:
            tokens += choice.get("token_ids") or []
        if len(tokens) >= 4 and not killed:
            killed = stack.kill("drafter")
    if killed:
        wait_until(lambda: stack.pid("drafter") != killed)
    return tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts, arguments.count)
    result = {"prompts": len(prompts), "tokens": 0, "accepted": 0, "drafted": 0}
    differ = {"drafting_on": 0, "drafting_off": 0, "drafter_killed": 0, "sampled_on_vs_off": 0}
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "run", {"engine.exact": True}) as stack,
    ):
        generate = reference(arguments.max_tokens)
        for i, prompt in enumerate(prompts):
            expected = generate(prompt)
            result["tokens"] += len(expected)
            common = {"max_tokens": arguments.max_tokens}
            on = stack.chat(prompt, temperature=0, **common)
            off = stack.chat(prompt, temperature=0, speculation={"enabled": False}, **common)
            result["accepted"] += on["speculation"]["accepted_tokens"]
            result["drafted"] += on["speculation"]["drafted_tokens"]
            differ["drafting_on"] += on["choices"][0]["token_ids"] != expected
            differ["drafting_off"] += off["choices"][0]["token_ids"] != expected
            if i % 10 == 0:
                differ["drafter_killed"] += killed_midway(stack, prompt, arguments.max_tokens) != expected
            sampled = {"temperature": 0.8, "seed": i, **common}
            a = stack.chat(prompt, **sampled)["choices"][0]["token_ids"]
            b = stack.chat(prompt, speculation={"enabled": False}, **sampled)["choices"][0]["token_ids"]
            differ["sampled_on_vs_off"] += a != b
            print(f"{i + 1}/{len(prompts)} {differ}", file=sys.stderr)
    print(json.dumps({**result, "answers_that_differ": differ}))
    return 1 if any(differ.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
