"""From records to the report of `paceline bench`: percentiles, rates, goodput, acceptance. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paceline.cli.bench.run import Record

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in milliseconds; None is no target."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def given(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


def parse_slo(text: str) -> Slo:
    """``ttft_ms=500,tpot_ms=50``, either one alone, or empty.

    Raises:
        ValueError: another key, or a value that is no positive number.
    """
    targets: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        try:
            target = float(value)
        except ValueError:
            target = math.nan
        if key.strip() not in ("ttft_ms", "tpot_ms") or not (math.isfinite(target) and target > 0):
            raise ValueError(f"--slo: want ttft_ms=MS,tpot_ms=MS, got {part!r}")
        targets[key.strip()] = target
    return Slo(**targets)


def ttft_ms(record: Record) -> float:
    return 1000 * (record.token_times_s[0] - record.due_s)


def e2e_ms(record: Record) -> float:
    return 1000 * (record.token_times_s[-1] - record.due_s)


def tpot_ms(record: Record) -> float | None:
    """(e2e − ttft)/(tokens − 1); None for a single token."""
    gaps = len(record.token_times_s) - 1
    return (e2e_ms(record) - ttft_ms(record)) / gaps if gaps else None


def itl_ms(record: Record) -> list[float]:
    """Gap before every token but the first. Of a chunk the first token has the gap, the others 0."""
    times = record.token_times_s
    return [1000 * (later - earlier) for earlier, later in pairwise(times)]


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p95, p99 by linear interpolation; None without values."""
    ordered = sorted(values)
    return {f"p{p}": _percentile(ordered, p) for p in PERCENTILES}


def _percentile(ordered: Sequence[float], percent: int) -> float | None:
    if not ordered:
        return None
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def meets(record: Record, slo: Slo) -> bool:
    """Whether the request was answered within the targets; a failed one never does."""
    if record.error is not None:
        return False
    each_ms = tpot_ms(record)
    return (slo.ttft_ms is None or ttft_ms(record) <= slo.ttft_ms) and (
        slo.tpot_ms is None or each_ms is None or each_ms <= slo.tpot_ms
    )


def report(records: Sequence[Record], slo: Slo) -> dict[str, Any]:
    """The benchmark's JSON.

    Rates are over the time from the start to the last answer's end. ``goodput_rps`` counts requests that met
    the targets (without targets: that were answered); ``slo_attained`` is their share of all requests, None
    without targets; ``acceptance`` is accepted over verified draft tokens, None if none was verified.
    """
    done = [record for record in records if record.error is None]
    good = sum(meets(record, slo) for record in records)
    duration_s = max((record.ended_s for record in records), default=0.0)
    verified = sum(record.verified_tokens for record in done)
    output_tokens = sum(len(record.token_times_s) for record in done)
    return {
        "requests": len(records),
        "errors": len(records) - len(done),
        "duration_s": duration_s,
        "ttft_ms": percentiles([ttft_ms(r) for r in done]),
        "tpot_ms": percentiles([each for r in done if (each := tpot_ms(r)) is not None]),
        "itl_ms": percentiles([gap for r in done for gap in itl_ms(r)]),
        "e2e_ms": percentiles([e2e_ms(r) for r in done]),
        "output_tokens_per_s": output_tokens / duration_s if duration_s else 0.0,
        "goodput_rps": good / duration_s if duration_s else 0.0,
        "slo_attained": good / len(records) if records and slo.given else None,
        "acceptance": sum(r.accepted_tokens for r in done) / verified if verified else None,
        "per_request": [_row(record, slo) for record in records],
    }


def _row(record: Record, slo: Slo) -> dict[str, Any]:
    answered = record.error is None
    return {
        "index": record.index,
        "due_s": record.due_s,
        "sent_s": record.sent_s,
        "ended_s": record.ended_s,
        "ttft_ms": ttft_ms(record) if answered else None,
        "tpot_ms": tpot_ms(record) if answered else None,
        "e2e_ms": e2e_ms(record) if answered else None,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": len(record.token_times_s),
        "drafted_tokens": record.drafted_tokens,
        "verified_tokens": record.verified_tokens,
        "accepted_tokens": record.accepted_tokens,
        "slo_met": meets(record, slo) if slo.given else None,
        "error": record.error,
    }
