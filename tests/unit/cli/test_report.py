"""The benchmark's numbers against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.cli.bench.report import (
    Slo,
    itl_ms,
    meets,
    parse_slo,
    percentiles,
    report,
    tpot_ms,
    ttft_ms,
)
from paceline.cli.bench.run import Record


def record(*token_times_s: float, due_s: float = 0.0, error: str | None = None, **counts: int) -> Record:
    ended_s = token_times_s[-1] if token_times_s else due_s
    return Record(0, due_s, due_s, list(token_times_s), ended_s, error=error, **counts)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_percentiles_are_numpys(count: int) -> None:
    values = np.random.default_rng(count).exponential(size=count)
    ours = percentiles(values.tolist())
    for name, percent in (("p50", 50), ("p95", 95), ("p99", 99)):
        assert ours[name] == pytest.approx(np.percentile(values, percent), rel=1e-12)


def test_no_values_have_no_percentiles() -> None:
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None}


def test_times_of_one_request() -> None:
    # Due at 1 s; 1 token at 3 s, a chunk of 2 at 4 s, 1 at 6 s.
    one = record(3.0, 4.0, 4.0, 6.0, due_s=1.0)
    assert ttft_ms(one) == 2000
    assert tpot_ms(one) == pytest.approx(1000)  # (5000 − 2000)/3
    assert itl_ms(one) == [1000, 0, 2000]


def test_the_mean_of_itl_is_tpot() -> None:
    times = np.cumsum(np.random.default_rng(0).exponential(size=50)).tolist()
    one = record(*times)
    assert np.mean(itl_ms(one)) == pytest.approx(tpot_ms(one))


def test_a_single_token_has_no_tpot() -> None:
    assert tpot_ms(record(1.0)) is None
    assert itl_ms(record(1.0)) == []


def test_targets() -> None:
    one = record(0.5, 0.75, 1.0)  # ttft 500, tpot 250
    assert meets(one, Slo())
    assert meets(one, Slo(500, 250))
    assert not meets(one, Slo(499, 250))
    assert not meets(one, Slo(500, 249))
    assert not meets(record(0.1, error="unavailable"), Slo())
    assert meets(record(0.1), Slo(tpot_ms=1))


def test_slo_option() -> None:
    assert parse_slo("") == Slo()
    assert parse_slo("ttft_ms=500,tpot_ms=50") == Slo(500, 50)
    assert parse_slo("tpot_ms=50") == Slo(None, 50)
    for text in ("e2e_ms=1", "ttft_ms", "ttft_ms=x", "ttft_ms=0", "ttft_ms=-1", "ttft_ms=nan"):
        with pytest.raises(ValueError, match="--slo"):
            parse_slo(text)


def test_the_report_has_the_contracts_keys_and_counts() -> None:
    records = [
        record(0.1, 0.2, verified_tokens=8, accepted_tokens=6),
        record(0.9, 1.0, 4.0, verified_tokens=2, accepted_tokens=1),
        record(error="queue_full"),
    ]
    result = report(records, Slo(ttft_ms=500))
    assert {
        *("requests", "errors", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "output_tokens_per_s"),
        *("goodput_rps", "slo_attained", "acceptance", "per_request"),
    } <= set(result)
    assert (result["requests"], result["errors"]) == (3, 1)
    assert result["output_tokens_per_s"] == pytest.approx(5 / 4)
    assert result["goodput_rps"] == pytest.approx(1 / 4)
    assert result["slo_attained"] == pytest.approx(1 / 3)
    assert result["acceptance"] == pytest.approx(7 / 10)
    assert [row["error"] for row in result["per_request"]] == [None, None, "queue_full"]
    assert [row["slo_met"] for row in result["per_request"]] == [True, False, False]


def test_without_targets_or_drafts_nothing_is_claimed() -> None:
    result = report([record(0.1)], Slo())
    assert result["slo_attained"] is None
    assert result["acceptance"] is None
    assert report([], Slo())["requests"] == 0
