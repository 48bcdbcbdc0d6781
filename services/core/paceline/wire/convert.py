"""Protobuf messages to core values and back; nothing else knows both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import MappingProxyType

from paceline.core.params import validate
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
from paceline.v1 import common_pb2, policy_pb2, worker_pb2

_MODES = {
    SpeculationMode.COUPLED: common_pb2.SPECULATION_MODE_COUPLED,
    SpeculationMode.REJECTION: common_pb2.SPECULATION_MODE_REJECTION,
}
_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}
_STATES = {
    WorkerState.STARTING: worker_pb2.WORKER_STATE_STARTING,
    WorkerState.READY: worker_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: worker_pb2.WORKER_STATE_DRAINING,
    WorkerState.LOST: worker_pb2.WORKER_STATE_LOST,
}
_ROLES = {
    WorkerRole.VERIFIER: worker_pb2.WORKER_ROLE_VERIFIER,
    WorkerRole.DRAFTER: worker_pb2.WORKER_ROLE_DRAFTER,
}
_MODE_OF = {value: key for key, value in _MODES.items()}
_FINISH_OF = {value: key for key, value in _FINISH.items()}
_STATE_OF = {value: key for key, value in _STATES.items()}
_ROLE_OF = {value: key for key, value in _ROLES.items()}


def sampling_to_proto(p: SamplingParams) -> common_pb2.SamplingParams:
    message = common_pb2.SamplingParams(
        temperature=p.temperature,
        top_p=p.top_p,
        top_k=p.top_k,
        min_p=p.min_p,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        repetition_penalty=p.repetition_penalty,
        logit_bias=dict(p.logit_bias),
        min_tokens=p.min_tokens,
        ignore_eos=p.ignore_eos,
        stop=p.stop,
        stop_token_ids=p.stop_token_ids,
        n=p.n,
    )
    if p.seed is not None:
        message.seed = p.seed
    if p.max_tokens is not None:
        message.max_tokens = p.max_tokens
    if p.logprobs is not None:
        message.logprobs = p.logprobs
    return message


def sampling_from_proto(
    m: common_pb2.SamplingParams, *, vocab_size: int | None = None, max_n: int | None = None
) -> SamplingParams:
    """Defaults filled in and limits checked; raises PacelineError naming ``sampling.FIELD``."""
    params = SamplingParams(
        temperature=m.temperature if m.HasField("temperature") else 1.0,
        top_p=m.top_p if m.HasField("top_p") else 1.0,
        top_k=m.top_k,
        min_p=m.min_p,
        seed=m.seed if m.HasField("seed") else None,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        repetition_penalty=m.repetition_penalty if m.HasField("repetition_penalty") else 1.0,
        logit_bias=MappingProxyType(dict(m.logit_bias)),
        min_tokens=m.min_tokens,
        ignore_eos=m.ignore_eos,
        max_tokens=m.max_tokens if m.HasField("max_tokens") else None,
        stop=tuple(m.stop),
        stop_token_ids=tuple(m.stop_token_ids),
        logprobs=m.logprobs if m.HasField("logprobs") else None,
        n=m.n if m.HasField("n") else 1,
    )
    return validate(params, vocab_size=vocab_size, max_n=max_n, field_prefix="sampling.")


def mode_to_proto(mode: SpeculationMode) -> common_pb2.SpeculationMode.ValueType:
    return _MODES[mode]


def mode_from_proto(value: common_pb2.SpeculationMode.ValueType) -> SpeculationMode:
    """Unset and unknown values are the default, coupled."""
    return _MODE_OF.get(value, SpeculationMode.COUPLED)


def speculation_to_proto(s: SpeculationOptions) -> common_pb2.SpeculationOptions:
    message = common_pb2.SpeculationOptions(
        enabled=s.enabled, mode=_MODES[s.mode], drafter=s.drafter, receipt=s.receipt
    )
    if s.max_draft_tokens is not None:
        message.max_draft_tokens = s.max_draft_tokens
    return message


def speculation_from_proto(m: common_pb2.SpeculationOptions) -> SpeculationOptions:
    return SpeculationOptions(
        enabled=m.enabled if m.HasField("enabled") else True,
        max_draft_tokens=m.max_draft_tokens if m.HasField("max_draft_tokens") else None,
        mode=mode_from_proto(m.mode),
        drafter=m.drafter,
        receipt=m.receipt,
    )


def slo_class_to_proto(c: SloClass) -> common_pb2.SloClass:
    return common_pb2.SloClass(name=c.name, ttft_ms=c.ttft_ms, tpot_ms=c.tpot_ms, priority=c.priority)


def slo_class_from_proto(m: common_pb2.SloClass) -> SloClass:
    return SloClass(m.name or "default", m.ttft_ms, m.tpot_ms, m.priority)


def usage_to_proto(u: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=u.prompt_tokens, completion_tokens=u.completion_tokens, cached_tokens=u.cached_tokens
    )


def usage_from_proto(m: common_pb2.Usage) -> Usage:
    return Usage(m.prompt_tokens, m.completion_tokens, m.cached_tokens)


def token_logprobs_to_proto(t: TokenLogprobs) -> common_pb2.TokenLogprobs:
    top = [common_pb2.TopLogprob(token_id=i, logprob=value) for i, value in t.top]
    return common_pb2.TokenLogprobs(logprob=t.logprob, top=top)


def token_logprobs_from_proto(m: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(m.logprob, tuple((t.token_id, t.logprob) for t in m.top))


def round_records_to_proto(rounds: Iterable[RoundRecord]) -> list[common_pb2.RoundRecord]:
    return [
        common_pb2.RoundRecord(
            k=r.k,
            asked=r.asked,
            arrived=r.arrived,
            accepted=r.accepted,
            waited_ms=r.waited_ms,
            reason=r.reason,
        )
        for r in rounds
    ]


def round_records_from_proto(messages: Iterable[common_pb2.RoundRecord]) -> list[RoundRecord]:
    return [RoundRecord(m.k, m.asked, m.arrived, m.accepted, m.waited_ms, m.reason) for m in messages]


def term_seconds_to_proto(t: TermSeconds) -> common_pb2.TermSeconds:
    return common_pb2.TermSeconds(
        prefill=t.prefill, draft=t.draft, verify=t.verify, network=t.network, queue=t.queue
    )


def term_seconds_from_proto(m: common_pb2.TermSeconds) -> TermSeconds:
    return TermSeconds(m.prefill, m.draft, m.verify, m.network, m.queue)


def _latency_to_proto(x: LatencyMs) -> common_pb2.LatencyMs:
    return common_pb2.LatencyMs(queue_ms=x.queue_ms, ttft_ms=x.ttft_ms, tpot_ms=x.tpot_ms, e2e_ms=x.e2e_ms)


def _latency_from_proto(m: common_pb2.LatencyMs) -> LatencyMs:
    return LatencyMs(m.queue_ms, m.ttft_ms, m.tpot_ms, m.e2e_ms)


def receipt_to_proto(r: Receipt) -> common_pb2.Receipt:
    message = common_pb2.Receipt(
        request_id=r.request_id,
        model=r.model,
        seed=r.seed,
        exact=r.exact,
        synthetic=r.synthetic,
        verifiers=r.verifiers,
        drafters=[common_pb2.DrafterRef(id=i, kind=k) for i, k in r.drafters],
        rounds=r.rounds,
        undrafted_rounds=r.undrafted_rounds,
        drafted_tokens=r.drafted_tokens,
        verified_tokens=r.verified_tokens,
        accepted_tokens=r.accepted_tokens,
        pruned_tokens=r.pruned_tokens,
        late_tokens=r.late_tokens,
        trimmed_tokens=r.trimmed_tokens,
        accepted_by_position=r.accepted_by_position,
        draft_length_histogram=dict(r.draft_length_histogram),
        wait_ms=r.wait_ms,
        resumes=r.resumes,
        reasons=dict(r.reasons),
        predicted=_latency_to_proto(r.predicted),
        observed=_latency_to_proto(r.observed),
    )
    if r.min_race_margin is not None:
        message.min_race_margin = r.min_race_margin
    return message


def receipt_from_proto(m: common_pb2.Receipt) -> Receipt:
    return Receipt(
        request_id=m.request_id,
        model=m.model,
        seed=m.seed,
        exact=m.exact,
        synthetic=m.synthetic,
        verifiers=list(m.verifiers),
        drafters=[(d.id, d.kind) for d in m.drafters],
        rounds=m.rounds,
        undrafted_rounds=m.undrafted_rounds,
        drafted_tokens=m.drafted_tokens,
        verified_tokens=m.verified_tokens,
        accepted_tokens=m.accepted_tokens,
        pruned_tokens=m.pruned_tokens,
        late_tokens=m.late_tokens,
        trimmed_tokens=m.trimmed_tokens,
        accepted_by_position=list(m.accepted_by_position),
        draft_length_histogram=Counter(dict(m.draft_length_histogram)),
        wait_ms=m.wait_ms,
        min_race_margin=m.min_race_margin if m.HasField("min_race_margin") else None,
        resumes=m.resumes,
        reasons=Counter(dict(m.reasons)),
        predicted=_latency_from_proto(m.predicted),
        observed=_latency_from_proto(m.observed),
    )


def step_record_to_proto(s: StepRecord) -> policy_pb2.StepRecord:
    return policy_pb2.StepRecord(
        sequences=s.sequences,
        query_tokens=s.query_tokens,
        prefill_tokens=s.prefill_tokens,
        query_context=s.query_context,
        seconds=s.seconds,
    )


def step_record_from_proto(m: policy_pb2.StepRecord) -> StepRecord:
    return StepRecord(m.sequences, m.query_tokens, m.prefill_tokens, m.query_context, m.seconds)


_PLAN_FIELDS = tuple(DraftPlan.__dataclass_fields__)


def draft_plan_to_proto(plan: DraftPlan) -> policy_pb2.DraftPlan:
    return policy_pb2.DraftPlan(**{name: getattr(plan, name) for name in _PLAN_FIELDS})


def draft_plan_from_proto(m: policy_pb2.DraftPlan) -> DraftPlan:
    return DraftPlan(**{name: getattr(m, name) for name in _PLAN_FIELDS})


def finish_reason_to_proto(reason: FinishReason) -> common_pb2.FinishReason.ValueType:
    return _FINISH[reason]


def finish_reason_from_proto(value: common_pb2.FinishReason.ValueType) -> FinishReason:
    return _FINISH_OF[value]


def worker_state_to_proto(state: WorkerState) -> worker_pb2.WorkerState.ValueType:
    return _STATES[state]


def worker_state_from_proto(value: worker_pb2.WorkerState.ValueType) -> WorkerState:
    """An unset state reads as starting."""
    return _STATE_OF.get(value, WorkerState.STARTING)


def worker_role_to_proto(role: WorkerRole) -> worker_pb2.WorkerRole.ValueType:
    return _ROLES[role]


def worker_role_from_proto(value: worker_pb2.WorkerRole.ValueType) -> WorkerRole:
    return _ROLE_OF.get(value, WorkerRole.VERIFIER)
