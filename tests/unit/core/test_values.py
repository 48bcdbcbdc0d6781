"""Prefix hash, acceptance, trimming, parameter limits, receipts."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ErrorKind, PacelineError
from paceline.core.params import validate
from paceline.core.sampling import accepted_length, trim
from paceline.core.tokens import EMPTY_HASH, extend_hash, prefix_hash
from paceline.core.types import Receipt, SamplingParams

TOKENS = st.lists(st.integers(0, 5), max_size=12)


@given(TOKENS, TOKENS)
def test_hash_of_a_sequence_does_not_depend_on_how_it_was_cut(a: list[int], b: list[int]) -> None:
    assert extend_hash(prefix_hash(a), b) == prefix_hash(a + b)
    assert prefix_hash([]) == EMPTY_HASH


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=40), st.data())
def test_hash_notices_a_changed_token(tokens: list[int], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:i], tokens[i] ^ 1, *tokens[i + 1 :]]
    assert prefix_hash(changed) != prefix_hash(tokens)


@given(TOKENS, TOKENS)
def test_a_round_commits_a_prefix_of_what_the_target_chose(draft: list[int], chosen: list[int]) -> None:
    n = accepted_length(draft, chosen)
    assert draft[:n] == chosen[:n]
    assert n == min(len(draft), len(chosen)) or draft[n] != chosen[n]


@given(TOKENS, TOKENS)
def test_trimming_keeps_exactly_the_continuation(committed: list[int], rest: list[int]) -> None:
    kept = trim(committed + rest, committed)
    assert kept is not None
    assert list(kept) == rest


@given(TOKENS, st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_trimming_drops_what_went_another_way(proposal: list[int], committed: list[int]) -> None:
    kept = trim(proposal, committed)
    assert (kept is None) == (proposal[: len(committed)] != committed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("seed", 2**63),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {100: 1.0}),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", ("x",) * 17),
        ("stop", ("",)),
        ("stop_token_ids", (100,)),
        ("logprobs", 21),
        ("n", 0),
        ("n", 5),
    ],
)
def test_limits_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(PacelineError) as caught:
        validate(replace(SamplingParams(), **{field: value}), vocab_size=100, max_n=4, field_prefix="s.")
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert caught.value.field == f"s.{field}"


def test_edges_are_allowed() -> None:
    params = SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        min_p=1.0,
        seed=-(2**63),
        logit_bias={99: -100.0},
        max_tokens=1,
        min_tokens=1,
        stop=("x",) * 16,
        stop_token_ids=(0, 99),
        logprobs=20,
        n=4,
    )
    assert validate(params, vocab_size=100, max_n=4) is params


def test_receipts_of_a_resumed_choice_add_up() -> None:
    first = Receipt(
        request_id="r",
        exact=True,
        verifiers=["v0"],
        drafters=[("d0", "ngram")],
        rounds=3,
        drafted_tokens=9,
        verified_tokens=7,
        accepted_tokens=4,
        late_tokens=2,
        accepted_by_position=[2, 2],
        draft_length_histogram=Counter({3: 2, 1: 1}),
        min_race_margin=0.5,
        reasons=Counter({"plan": 3}),
    )
    later = Receipt(
        request_id="r",
        exact=True,
        verifiers=["v1"],
        drafters=[("d0", "ngram")],
        rounds=2,
        drafted_tokens=3,
        verified_tokens=3,
        accepted_tokens=3,
        accepted_by_position=[1, 1, 1],
        draft_length_histogram=Counter({3: 1}),
        min_race_margin=0.25,
        resumes=1,
        reasons=Counter({"plan": 1, "no_drafter": 1}),
    )
    both = first.merged(later).to_json()
    assert both["verifiers"] == ["v0", "v1"]
    assert both["drafters"] == [{"id": "d0", "kind": "ngram"}]
    assert both["rounds"] == 5
    assert both["drafted_tokens"] == 12
    assert both["accepted_by_position"] == [3, 3, 1]
    assert both["draft_length_histogram"] == {"1": 1, "3": 3}
    assert both["reasons"] == {"no_drafter": 1, "plan": 4}
    assert both["min_race_margin"] == 0.25
    assert both["resumes"] == 1
