"""Prometheus metrics under the names that vLLM's users already scrape, and our own beside them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_FAST_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 1)


class RequestMetrics:
    """Of requests as the gateway sees them."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["model_name"], registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=registry, buckets=_SECONDS)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=registry)

        running = gauge("vllm:num_requests_running", "Requests dispatched to a verifier.")
        waiting = gauge("vllm:num_requests_waiting", "Requests in the admission queue.")
        ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.")
        itl = histogram("vllm:inter_token_latency_seconds", "Time between tokens, by token.")
        e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.")
        prompt = counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        generation = counter("vllm:generation_tokens", "Tokens generated.")
        self.running = running.labels(model)
        self.waiting = waiting.labels(model)
        self.ttft = ttft.labels(model)
        self.itl = itl.labels(model)
        self.e2e = e2e.labels(model)
        self.prompt_tokens = prompt.labels(model)
        self.generation_tokens = generation.labels(model)
        self._model = model
        self._success = Counter(
            "vllm:request_success", "Finished requests.", ["model_name", "finished_reason"], registry=registry
        )
        for reason in ("stop", "length"):
            self._success.labels(model, reason)
        self.errors = Counter("paceline_request_errors", "Requests that failed.", ["code"], registry=registry)
        self.leases = Gauge("paceline_leases", "Leases this gateway holds.", registry=registry)
        self.slo_attained = Counter(
            "paceline_slo_attained", "Requests that met their class's targets.", ["class"], registry=registry
        )
        self.slo_missed = Counter(
            "paceline_slo_missed", "Requests that missed a target.", ["class"], registry=registry
        )

    def success(self, reason: str) -> None:
        self._success.labels(self._model, reason).inc()


class EngineMetrics:
    """Of a verifier's steps and rounds, or a drafter's drafting."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["model_name"], registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=registry)

        self.running = gauge("vllm:num_requests_running", "Sequences in the batch.").labels(model)
        self.waiting = gauge("vllm:num_requests_waiting", "Sequences not admitted yet.").labels(model)
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use.").labels(model)
        self.drafts = counter("vllm:spec_decode_num_drafts", "Rounds with a draft.").labels(model)
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Verified.").labels(model)
        self.accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens", "Accepted.").labels(model)
        self._model = model
        self._accepted_per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            ["model_name", "position"],
            registry=registry,
        )
        self._accepted_per_position.labels(model, "0")
        self.step_seconds = Histogram(
            "paceline_step_seconds",
            "Seconds of a step by part: plan, forward, commit, hold; draft in a drafter.",
            ["part"],
            registry=registry,
            buckets=_FAST_SECONDS,
        )
        self.draft_length = Histogram(
            "paceline_draft_length",
            "Draft tokens verified a round.",
            registry=registry,
            buckets=tuple(range(17)),
        )
        self.kv_blocks = Gauge("paceline_kv_blocks", "KV blocks by state.", ["state"], registry=registry)
        self.sessions = Gauge("paceline_sessions", "Draft sessions open.", registry=registry)
        self.stale_frames = Counter(
            "paceline_stale_frames",
            "Proposals or commits not used, by reason.",
            ["reason"],
            registry=registry,
        )
        self.preemptions = counter("vllm:num_preemptions", "Sequences preempted by recompute.").labels(model)

    def accepted_at(self, position: int) -> None:
        self._accepted_per_position.labels(self._model, str(position)).inc()
