"""What a benchmark sends and when. Pure: one seed gives the same requests at the same times."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

Arrival = Literal["poisson", "constant", "burst"]

TOKEN_IDS = range(200, 8_000)
"""Ids of ordinary words in every vocabulary of use; special ids lie outside."""
MOONCAKE_BLOCK_TOKENS = 512
BURST_REQUESTS = 8


class WorkloadError(Exception):
    """A prompt file, trace or option that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: text for the chat API, or token ids for exact lengths."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    output_tokens: int = 128
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One line of a trace; ``blocks`` are Mooncake's ids of shared prefix blocks."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def arrival_times(arrival: Arrival, rate_rps: float, seconds: float, seed: int) -> list[float]:
    """Seconds at which requests are due, ascending, below ``seconds``.

    ``burst``: groups of `BURST_REQUESTS` at once, the groups Poisson, with the same mean rate.
    """
    if rate_rps <= 0:
        raise WorkloadError(f"--rate: want a number above 0, got {rate_rps}")
    if arrival == "constant":
        return [i / rate_rps for i in range(_count_below(rate_rps, seconds))]
    size = BURST_REQUESTS if arrival == "burst" else 1
    times = _poisson(random.Random(f"arrivals {seed}"), rate_rps / size, seconds)
    return [at_s for at_s in times for _ in range(size)]


def _count_below(rate_rps: float, seconds: float) -> int:
    count = int(rate_rps * seconds)
    return count if count / rate_rps >= seconds else count + 1


def _poisson(source: random.Random, rate_rps: float, seconds: float) -> Iterator[float]:
    at_s = source.expovariate(rate_rps)
    while at_s < seconds:
        yield at_s
        at_s += source.expovariate(rate_rps)


def prompt_requests(file: Path, output_tokens: int, seed: int) -> list[Request]:
    """Requests from JSON lines with ``turns[0]`` or ``prompt``, in an order drawn by the seed."""
    requests = []
    for number, line in enumerate(_lines(file), 1):
        try:
            row = json.loads(line)
            text = row["turns"][0] if "turns" in row else row["prompt"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise WorkloadError(f"--prompts {file}:{number}: want JSON with turns[0] or prompt") from None
        if not isinstance(text, str) or not text:
            raise WorkloadError(f"--prompts {file}:{number}: the prompt must be text and not empty")
        requests.append(Request(text=text, output_tokens=output_tokens))
    if not requests:
        raise WorkloadError(f"--prompts {file}: no prompts")
    random.Random(f"prompts {seed}").shuffle(requests)
    return requests


def length_requests(prompt_tokens: int, output_tokens: int, seed: int) -> Iterator[Request]:
    """Endless requests of one shape; every prompt is different, so that no prefix is cached."""
    source = random.Random(f"lengths {seed}")
    while True:
        yield _of_tokens(source.choices(TOKEN_IDS, k=prompt_tokens), output_tokens)


def trace_requests(rows: Iterable[TraceRow], length_scale: float, seed: int) -> Iterator[Request]:
    """Requests with the trace's lengths; rows that share prefix blocks share those tokens."""
    source = random.Random(f"trace {seed}")
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS * length_scale))
    for row in rows:
        wanted = max(1, round(row.prompt_tokens * length_scale))
        ids: list[int] = []
        for block in row.blocks:
            ids += random.Random(f"block {seed} {block}").choices(TOKEN_IDS, k=block_tokens)
        ids += source.choices(TOKEN_IDS, k=max(0, wanted - len(ids)))
        yield _of_tokens(ids[:wanted], max(1, round(row.output_tokens * length_scale)))


def _of_tokens(token_ids: Sequence[int], output_tokens: int) -> Request:
    return Request(token_ids=tuple(token_ids), output_tokens=output_tokens, ignore_eos=True)


def read_trace(spec: str) -> list[TraceRow]:
    """Rows of ``azure:FILE`` or ``mooncake:FILE`` in order of arrival, the first at 0 s.

    Raises:
        WorkloadError: another kind, or a file that is not of that kind.
    """
    kind, _, name = spec.partition(":")
    if kind not in ("azure", "mooncake") or not name:
        raise WorkloadError(f"--trace: want azure:FILE or mooncake:FILE, got {spec!r}")
    file = Path(name)
    try:
        reader = _azure(_lines(file)) if kind == "azure" else _mooncake(_lines(file))
        rows = sorted(reader, key=lambda row: row.at_s)
    except (ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"--trace {spec}: not a trace of this kind: {error}") from None
    if not rows:
        raise WorkloadError(f"--trace {spec}: no rows")
    first_s = rows[0].at_s
    return [TraceRow(r.at_s - first_s, r.prompt_tokens, r.output_tokens, r.blocks) for r in rows]


def _azure(lines: Iterable[str]) -> Iterator[TraceRow]:
    for row in csv.DictReader(lines):
        # Seven digits of a second, one more than datetime reads.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        yield TraceRow(
            (at - datetime(2023, 1, 1)).total_seconds(),  # noqa: DTZ001 - the trace has no time zone
            int(row["ContextTokens"]),
            int(row["GeneratedTokens"]),
        )


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRow]:
    for line in lines:
        row = json.loads(line)
        yield TraceRow(
            row["timestamp"] / 1000,
            int(row["input_length"]),
            int(row["output_length"]),
            tuple(int(block) for block in row.get("hash_ids", ())),
        )


def trace_times(rows: Sequence[TraceRow], rate_scale: float, seconds: float) -> list[float]:
    """The trace's own arrival times, ``rate_scale`` times as fast, below ``seconds``."""
    return [row.at_s / rate_scale for row in rows if row.at_s / rate_scale < seconds]


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{file}: {error}") from None
