"""What the benchmark sends, and when."""

from __future__ import annotations

import json
import math
from itertools import islice, pairwise
from pathlib import Path

import pytest

from paceline.cli.bench.command import Source, parse_lengths
from paceline.cli.bench.workload import (
    BURST_REQUESTS,
    TOKEN_IDS,
    TraceRow,
    WorkloadError,
    arrival_times,
    length_requests,
    prompt_requests,
    read_trace,
    trace_requests,
    trace_times,
)

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data folder is absent")


def test_poisson_gaps_have_the_exponential_mean_and_variance() -> None:
    rate = 20.0
    times = arrival_times("poisson", rate, 1000.0, seed=1)
    # Count in T is Poisson(rate*T): mean = variance = 20000; 5 standard deviations.
    assert abs(len(times) - 20_000) < 5 * math.sqrt(20_000)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((g - mean) ** 2 for g in gaps) / len(gaps)
    # Exponential(rate): mean 1/rate, variance 1/rate²; standard errors 1/√n and √8/√n relative.
    assert mean == pytest.approx(1 / rate, rel=5 / math.sqrt(len(gaps)))
    assert variance == pytest.approx(1 / rate**2, rel=5 * math.sqrt(8 / len(gaps)))


def test_poisson_counts_in_windows_have_variance_equal_to_mean() -> None:
    times = arrival_times("poisson", 5.0, 4000.0, seed=2)
    counts = [0] * 4000
    for at_s in times:
        counts[int(at_s)] += 1
    mean = sum(counts) / len(counts)
    dispersion = sum((c - mean) ** 2 for c in counts) / (len(counts) - 1) / mean
    assert dispersion == pytest.approx(1, abs=5 * math.sqrt(2 / len(counts)))


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert arrival_times("constant", 4.0, 1.0, seed=0) == [0.0, 0.25, 0.5, 0.75]
    assert arrival_times("constant", 2.0, 1.1, seed=0) == [0.0, 0.5, 1.0]


def test_bursts_come_in_groups_at_the_same_mean_rate() -> None:
    times = arrival_times("burst", 16.0, 2000.0, seed=3)
    groups = len(set(times))
    assert len(times) == groups * BURST_REQUESTS
    # Groups are Poisson with rate 16/8.
    assert abs(groups - 4000) < 5 * math.sqrt(4000)


@pytest.mark.parametrize("arrival", ["poisson", "constant", "burst"])
def test_one_seed_gives_one_schedule(arrival: str) -> None:
    times = arrival_times(arrival, 7.0, 30.0, seed=4)  # type: ignore[arg-type]
    assert times == arrival_times(arrival, 7.0, 30.0, seed=4)  # type: ignore[arg-type]
    assert times == sorted(times)
    assert all(0 <= t < 30 for t in times)


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(WorkloadError, match="--rate"):
        arrival_times("poisson", 0.0, 1.0, seed=0)


def test_prompts_are_read_in_either_form_and_shuffled_by_seed(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    rows = [{"turns": [f"t{i}", "later"]} for i in range(20)] + [{"prompt": "p"}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    requests = prompt_requests(file, 9, seed=1)
    assert {r.text for r in requests} == {f"t{i}" for i in range(20)} | {"p"}
    assert all((r.output_tokens, r.ignore_eos, r.token_ids) == (9, False, ()) for r in requests)
    assert requests == prompt_requests(file, 9, seed=1)
    assert requests != prompt_requests(file, 9, seed=2)


@pytest.mark.parametrize(
    "line", ["{", "3", '{"turns": []}', '{"text": "x"}', '{"prompt": ""}', '{"prompt": 3}']
)
def test_a_bad_prompt_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "x"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match=r"p\.jsonl:2"):
        prompt_requests(file, 1, seed=0)


def test_an_empty_or_missing_prompt_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name in ("empty", "absent"):
        with pytest.raises(WorkloadError, match=name):
            prompt_requests(tmp_path / name, 1, seed=0)


def test_lengths_are_exact_and_prompts_differ() -> None:
    requests = list(islice(length_requests(30, 5, seed=1), 50))
    assert all(len(r.token_ids) == 30 and r.output_tokens == 5 and r.ignore_eos for r in requests)
    assert all(token in TOKEN_IDS for r in requests for token in r.token_ids)
    assert len({r.token_ids for r in requests}) == 50
    assert requests == list(islice(length_requests(30, 5, seed=1), 50))


def test_azure_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.5000000,374,44\n"
        "2023-11-17 00:00:00.7500009,396,109\n",
        encoding="utf-8",
    )
    rows = read_trace(f"azure:{file}")
    assert rows[0] == TraceRow(0.0, 374, 44)
    assert (rows[1].prompt_tokens, rows[1].output_tokens) == (396, 109)
    assert rows[1].at_s == pytest.approx(1.25, abs=1e-6)


def test_mooncake_rows(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    rows = [
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 1000, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert read_trace(f"mooncake:{file}") == [
        TraceRow(0.0, 700, 6, (0, 2)),
        TraceRow(2.0, 600, 5, (0, 1)),
    ]


@pytest.mark.parametrize("spec", ["sharegpt:x", "azure", "azure:", "azure:/no/such/file"])
def test_another_trace_is_refused_by_name(spec: str) -> None:
    with pytest.raises(WorkloadError, match=spec.partition(":")[2] or "--trace"):
        read_trace(spec)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("hello\nworld\n", encoding="utf-8")
    for kind in ("azure", "mooncake"):
        with pytest.raises(WorkloadError, match="not a trace of this kind"):
            read_trace(f"{kind}:{file}")


def test_rows_with_common_blocks_share_a_prefix() -> None:
    rows = [TraceRow(0, 1200, 8, (7, 8, 9)), TraceRow(0, 1100, 8, (7, 8, 5)), TraceRow(0, 20, 8, (6,))]
    a, b, c = trace_requests(rows, 1.0, seed=1)
    assert [len(r.token_ids) for r in (a, b, c)] == [1200, 1100, 20]
    assert a.token_ids[:1024] == b.token_ids[:1024]
    assert a.token_ids[1024:1100] != b.token_ids[1024:1100]
    assert a.token_ids[:20] != c.token_ids


def test_scaled_lengths_keep_their_share_of_common_prefix() -> None:
    rows = [TraceRow(0, 1024, 100, (7, 8)), TraceRow(0, 1024, 100, (7, 5))]
    a, b = trace_requests(rows, 0.25, seed=1)
    assert len(a.token_ids) == 256
    assert a.output_tokens == 25
    assert a.token_ids[:128] == b.token_ids[:128]
    assert a.token_ids[128:] != b.token_ids[128:]


def test_scaled_rate_compresses_time() -> None:
    rows = [TraceRow(float(t), 1, 1) for t in range(10)]
    assert trace_times(rows, 2.0, 3.0) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


@needs_data
def test_the_real_traces_have_their_documented_sizes() -> None:
    azure = read_trace(f"azure:{DATA / 'AzureLLMInferenceTrace_conv.csv'}")
    assert len(azure) == 19_366
    assert azure[-1].at_s == pytest.approx(3502, abs=1)
    assert len(read_trace(f"mooncake:{DATA / 'mooncake_conversation.jsonl'}")) == 12_031
    assert len(prompt_requests(DATA / "prompts_specbench_half.jsonl", 1, seed=0)) > 200


def source(**given: object) -> Source:
    options: dict[str, object] = {
        **dict.fromkeys(("prompts", "trace", "lengths", "rate_rps", "concurrency")),
        "length_scale": 1.0,
        "rate_scale": 1.0,
        "arrival": "poisson",
        "seconds": 10.0,
        "max_tokens": 8,
        "seed": 0,
        **given,
    }
    return Source(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"lengths": "1:1", "trace": "azure:x", "rate_rps": 1.0},
        {"lengths": "1:1"},
        {"lengths": "1:1", "rate_rps": 1.0, "concurrency": 1},
        {"lengths": "1:1", "rate_rps": 1.0, "seconds": 0.0},
        {"lengths": "1:1", "rate_rps": 1.0, "length_scale": 0.0},
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="want "):
        source(**given).check()


def test_a_trace_brings_its_own_times_unless_a_rate_is_given(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    rows = [{"timestamp": 1000 * i, "input_length": 4, "output_length": 2} for i in range(5)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    trace = f"mooncake:{file}"
    assert source(trace=trace, seconds=2.5).build()[1] == [0.0, 1.0, 2.0]
    assert source(trace=trace, rate_rps=2.0, arrival="constant", seconds=1.0).build()[1] == [0.0, 0.5]
    requests, times = source(trace=trace, concurrency=3).build()
    assert times is None
    assert len(list(islice(requests, 12))) == 12  # begins again at the end


def test_lengths_option() -> None:
    assert parse_lengths("128:64") == (128, 64)
    for text in ("128", "0:1", "1:0", "a:b", "1:2:3"):
        with pytest.raises(ValueError, match="--lengths"):
            parse_lengths(text)
