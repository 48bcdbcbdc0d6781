"""Every value survives the wire, and what arrives is checked."""

import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import PacelineError
from paceline.core.types import (
    DraftPlan,
    FinishReason,
    LatencyMs,
    Receipt,
    RoundRecord,
    SamplingParams,
    SloClass,
    SpeculationMode,
    SpeculationOptions,
    StepRecord,
    TermSeconds,
    TokenLogprobs,
    Usage,
    WorkerRole,
    WorkerState,
)
from paceline.v1 import common_pb2
from paceline.wire import convert

NAME = st.text(string.ascii_letters, max_size=8)
COUNT = st.integers(0, 2**32 - 1)
REAL = st.floats(0, 1e9, allow_nan=False)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 1000),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 5),
    logit_bias=st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 5),
    ignore_eos=st.booleans(),
    max_tokens=st.none() | st.integers(5, 1000),
    stop=st.lists(st.text(min_size=1, max_size=4).filter(lambda s: s.isprintable()), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 1000), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    n=st.integers(1, 4),
)
LATENCY = st.builds(LatencyMs, REAL, REAL, REAL, REAL)
RECEIPTS = st.builds(
    Receipt,
    request_id=NAME,
    model=NAME,
    seed=st.integers(-(2**63), 2**63 - 1),
    exact=st.booleans(),
    synthetic=st.booleans(),
    verifiers=st.lists(NAME, max_size=2),
    drafters=st.lists(st.tuples(NAME, NAME), max_size=2),
    rounds=COUNT,
    undrafted_rounds=COUNT,
    drafted_tokens=COUNT,
    verified_tokens=COUNT,
    accepted_tokens=COUNT,
    pruned_tokens=COUNT,
    late_tokens=COUNT,
    trimmed_tokens=COUNT,
    accepted_by_position=st.lists(COUNT, max_size=4),
    draft_length_histogram=st.dictionaries(st.integers(0, 16), COUNT, max_size=4).map(Counter),
    wait_ms=REAL,
    min_race_margin=st.none() | REAL,
    resumes=COUNT,
    reasons=st.dictionaries(NAME, COUNT, max_size=3).map(Counter),
    predicted=LATENCY,
    observed=LATENCY,
)


@given(PARAMS)
def test_sampling_round_trip(params: SamplingParams) -> None:
    message = convert.sampling_to_proto(params)
    assert (
        convert.sampling_from_proto(common_pb2.SamplingParams.FromString(message.SerializeToString()))
        == params
    )


def test_absent_sampling_fields_have_their_documented_defaults() -> None:
    assert convert.sampling_from_proto(common_pb2.SamplingParams()) == SamplingParams()


def test_sampling_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(PacelineError) as caught:
        convert.sampling_from_proto(common_pb2.SamplingParams(temperature=-1))
    assert caught.value.field == "sampling.temperature"


@given(RECEIPTS)
def test_receipt_round_trip(receipt: Receipt) -> None:
    assert convert.receipt_from_proto(convert.receipt_to_proto(receipt)) == receipt


@given(
    st.builds(
        SpeculationOptions,
        st.booleans(),
        st.none() | st.integers(0, 16),
        st.sampled_from(SpeculationMode),
        NAME,
        st.booleans(),
    )
)
def test_speculation_round_trip(options: SpeculationOptions) -> None:
    assert convert.speculation_from_proto(convert.speculation_to_proto(options)) == options


def test_small_values_round_trip() -> None:
    slo = SloClass("tight", 200.0, 40.0, -3)
    assert convert.slo_class_from_proto(convert.slo_class_to_proto(slo)) == slo
    usage = Usage(3, 4, 2)
    assert convert.usage_from_proto(convert.usage_to_proto(usage)) == usage
    rounds = [RoundRecord(3, 4, 4, 2, 0.5, "plan"), RoundRecord(0, 0, 0, 0, 0.0, "off")]
    assert convert.round_records_from_proto(convert.round_records_to_proto(rounds)) == rounds
    terms = TermSeconds(0.1, 0.2, 0.3, 0.4, 0.5)
    assert convert.term_seconds_from_proto(convert.term_seconds_to_proto(terms)) == terms
    step = StepRecord(2, 7, 3, 900, 0.04)
    assert convert.step_record_from_proto(convert.step_record_to_proto(step)) == step
    plan = DraftPlan(7, "d0", 3, 0.01, 0.02, 0.001, 0.002, 1e-6, 0.7, 0.1, 0.001, 0.002, 0.0005, "best")
    assert convert.draft_plan_from_proto(convert.draft_plan_to_proto(plan)) == plan
    logprobs = TokenLogprobs(-0.5, ((1, -0.5), (2, -1.25)))
    assert convert.token_logprobs_from_proto(convert.token_logprobs_to_proto(logprobs)) == logprobs
    for reason in FinishReason:
        assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) is reason
    for state in WorkerState:
        assert convert.worker_state_from_proto(convert.worker_state_to_proto(state)) is state
    for role in WorkerRole:
        assert convert.worker_role_from_proto(convert.worker_role_to_proto(role)) is role
