"""The closed forms of core.latency against independent identities, published figures and simulation."""

from __future__ import annotations

import math
import random

import pytest

from paceline.core.latency import (
    Coefficients,
    RoundModel,
    StepTerms,
    Workload,
    break_even_load,
    break_even_rps,
    expected_tokens,
    mean_latency,
    pair_latency_terms,
    speedup,
)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.77, 0.999])
@pytest.mark.parametrize("k", [0, 1, 5, 16])
def test_expected_tokens_is_the_sum_of_survivals(alpha: float, k: int) -> None:
    assert expected_tokens(alpha, k) == pytest.approx(sum(alpha**i for i in range(k + 1)), rel=1e-12)


def test_expected_tokens_at_certain_acceptance_and_in_simulation() -> None:
    assert expected_tokens(1.0, 7) == 8.0
    rng = random.Random(5)
    rounds = 40_000
    tokens = 0
    for _ in range(rounds):
        accepted = 0
        while accepted < 4 and rng.random() < 0.7:
            accepted += 1
        tokens += accepted + 1
    # The count has a deviation below 1.6 a round: four standard errors.
    assert tokens / rounds == pytest.approx(expected_tokens(0.7, 4), abs=4 * 1.6 / math.sqrt(rounds))


# Best k in 1..10 minimising (1 + k rho) / E; published figures (research/latency-model.md, section 1).
@pytest.mark.parametrize(
    ("rho", "best"),
    [(0.05, (4, 6, 8, 10)), (0.1, (3, 4, 6, 10)), (0.5, (1, 1, 2, 3)), (0.9, (1, 1, 1, 1))],
)
def test_published_best_draft_lengths(rho: float, best: tuple[int, ...]) -> None:
    for alpha, expected in zip((0.6, 0.7, 0.8, 0.9), best, strict=True):
        cost = Coefficients(prefill_s=0.0, verify_s=1.0, draft_s=rho)
        found = min(range(1, 11), key=lambda k: cost.effective(alpha, k, output_tokens=100))
        assert found == expected


def test_latency_is_littles_law_fixed_point() -> None:
    c1_s, c2_s, rate_rps = 1.5, 0.2, 4.0
    latency_s = c1_s
    for _ in range(500):
        latency_s = c1_s + rate_rps * latency_s * c2_s
    assert mean_latency(c1_s, c2_s, rate_rps) == pytest.approx(latency_s)
    assert mean_latency(c1_s, c2_s, 5.0) == math.inf


def test_speedup_is_the_ratio_of_latencies_and_has_its_limits() -> None:
    plain, drafted = (2.0, 0.1), (1.2, 0.14)
    ratios = drafted[0] / plain[0], drafted[1] / plain[1]
    for rate_rps in (0.0, 1.0, 5.0, 7.0):
        expected = mean_latency(*plain, rate_rps) / mean_latency(*drafted, rate_rps)
        assert speedup(*ratios, rate_rps * plain[1]) == pytest.approx(expected)
    assert speedup(*ratios, 0.0) == pytest.approx(1.0 / ratios[0])
    assert speedup(0.6, 1.4, 1.0 / 1.4) == 0.0
    assert speedup(0.6, 0.9, 1.0 - 1e-9) > 1e6
    assert speedup(0.6, 0.9, 1.0) == math.inf
    assert speedup(0.6, 1.4, 0.999) == 0.0


def test_break_even_load_makes_the_speedup_one() -> None:
    load = break_even_load(0.6, 1.4)
    assert load == pytest.approx(0.5)
    assert speedup(0.6, 1.4, 0.5) == pytest.approx(1.0)
    assert break_even_load(1.1, 1.4) is None
    assert break_even_load(0.6, 0.9) is None


def test_wait_is_bounded_and_undrafted_rounds_bring_one_token() -> None:
    model = RoundModel(lambda k: 0.02, 0.004, 0.002, alpha=0.5, undrafted_share=0.25, max_wait_s=0.01)
    assert [model.wait_s(k) for k in (0, 1, 3, 4)] == pytest.approx([0.0, 0.006, 0.01, 0.01])
    assert model.tokens(1) == pytest.approx(0.75 * 1.5 + 0.25)
    assert model.tpot_s(0) == 0.02
    assert model.tpot_s(1) == pytest.approx(0.026 / 1.375)


def test_step_terms_price_decode_and_chunked_prompt() -> None:
    terms = StepTerms(0.01, 0.002, 0.001, 1e-6, 5e-4)
    # 3 sequences, 4 tokens and 3 times 4 x 100 of query-context.
    assert terms.decode_s(3, 3, 100.0) == pytest.approx(0.01 + 3 * 0.002 + 12 * 0.001 + 1200 * 1e-6)
    # Chunks 64, 64, 22 end at contexts 64, 128, 150.
    context = 64 * 64 + 64 * 128 + 22 * 150
    assert terms.prompt_s(150, 64) == pytest.approx(150 * 5e-4 + context * 1e-6)
    assert terms.scaled(2.0).decode_s(3, 3, 100.0) == pytest.approx(2 * terms.decode_s(3, 3, 100.0))


def _pair(alpha: float, token_s: float) -> tuple[StepTerms, RoundModel, Workload]:
    terms = StepTerms(base_s=0.02, token_s=token_s, prefill_token_s=1e-4)
    work = Workload(prompt_tokens=100, output_tokens=200, chunk_tokens=512)
    rounds = RoundModel(lambda k: terms.decode_s(1, k, 200.0), 0.0, 0.001, alpha, 0.0, max_wait_s=0.021)
    return terms, rounds, work


def test_terms_split_the_latency_of_a_station() -> None:
    terms, rounds, work = _pair(0.8, 0.001)
    c1_s, c2_s = pair_latency_terms(terms, rounds, 0, work)
    # B residents: one prefill step, then 200 steps of B tokens; each of the B stalls it once by its prompt.
    for residents in (1, 5, 16):
        expected = 0.02 + residents * 100 * 1e-4 + 200 * (0.02 + residents * 0.001)
        assert c1_s + residents * c2_s == pytest.approx(expected)


def test_drafting_pays_below_the_break_even_rate_and_not_above() -> None:
    terms, rounds, work = _pair(0.6, 0.004)
    rate_rps = break_even_rps(terms, rounds, range(1, 9), work)
    assert rate_rps is not None
    plain = pair_latency_terms(terms, rounds, 0, work)
    drafted = [pair_latency_terms(terms, rounds, k, work) for k in range(1, 9)]
    below = [mean_latency(*terms_k, 0.99 * rate_rps) for terms_k in drafted]
    above = [mean_latency(*terms_k, 1.01 * rate_rps) for terms_k in drafted]
    assert min(below) < mean_latency(*plain, 0.99 * rate_rps)
    assert min(above) > mean_latency(*plain, 1.01 * rate_rps)


def test_no_break_even_where_drafting_always_or_never_pays() -> None:
    always = _pair(0.9, 0.0)
    assert break_even_rps(always[0], always[1], range(1, 9), always[2]) is None
    never = _pair(0.0, 0.004)
    assert break_even_rps(never[0], never[1], range(1, 9), never[2]) is None
