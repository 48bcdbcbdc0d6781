"""What the policy adds to its admin port: the fleet, explanations, metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from paceline.core.errors import PacelineError
from paceline.policy.fleet import Fleet
from paceline.wire.status import error_body, http_status


def fleet_json(fleet: Fleet) -> dict[str, object]:
    """The contract's form of ``GET /fleet``; null where nothing was measured."""
    return {
        "workers": [
            {
                "id": w.id,
                "role": w.role.value,
                "state": w.state.value,
                "pid": w.pid,
                "running": w.running,
                "sessions": w.sessions,
                "blocks_used": w.blocks_used,
                "slowdown_observed": round(w.slowdown_observed, 4),
                "alpha": None if w.alpha is None else round(w.alpha, 4),
                "last_report_age_s": round(w.last_report_age_s, 3),
            }
            for w in fleet.statuses()
        ],
        "pairs": [
            {
                "verifier": p.verifier_id,
                "drafter": p.drafter_id,
                "weight": round(p.weight, 4),
                "k": p.draft_tokens,
                "predicted_tpot_ms": round(p.predicted_tpot_s * 1e3, 4),
            }
            for p in fleet.pairs
        ],
        "plan_age_s": round(fleet.plan_age_s, 3),
    }


def routes(fleet: Fleet) -> list[Route]:
    """``GET /fleet`` and ``GET /explain?verifier=&drafter=``."""

    async def get_fleet(_: Request) -> JSONResponse:
        return JSONResponse(fleet_json(fleet))

    async def get_explain(request: Request) -> JSONResponse:
        query = request.query_params
        try:
            found = fleet.explain(query.get("verifier", ""), query.get("drafter", ""))
        except PacelineError as error:
            return JSONResponse(error_body(error), status_code=http_status(error.kind))
        return JSONResponse(
            {
                "plan": asdict(found.plan),
                "neighbours": [
                    {"k": k, "tpot_ms": round(tpot_s * 1e3, 4)} for k, tpot_s in enumerate(found.tpot_s)
                ],
                "break_even_rps": found.break_even_rps,
            }
        )

    return [Route("/fleet", get_fleet), Route("/explain", get_explain)]


class FleetCollector(Collector):
    """Reads the fleet when scraped."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet
        refits = Counter({worker.id: worker.steps.refits for worker in fleet.workers.values()})
        for name, text, label, counts in (
            ("reports", "Reports taken", "worker", fleet.reports),
            ("ignored_reports", "Impossible reports, or parts of them, left out", "reason", fleet.ignored),
            ("plans", "Plans made, by reason", "reason", fleet.plans),
            ("refits", "Step-time fits", "worker", refits),
            ("requests", "Finished requests, by SLO class", "class", fleet.requests),
        ):
            counter = CounterMetricFamily(f"paceline_policy_{name}", text, labels=[label])
            for value, count in sorted(counts.items()):
                counter.add_metric([value], count)
            yield counter
        yield GaugeMetricFamily(
            "paceline_policy_plan_age_seconds", "Since the last planning", value=fleet.plan_age_s
        )
        slowdown = GaugeMetricFamily(
            "paceline_policy_slowdown", "Last step times over the long-run fit", labels=["worker"]
        )
        for worker in fleet.statuses():
            slowdown.add_metric([worker.id], worker.slowdown_observed)
        yield slowdown
        lengths = GaugeMetricFamily(
            "paceline_policy_draft_tokens", "Planned draft length", labels=["verifier", "drafter"]
        )
        for pair in fleet.pairs:
            lengths.add_metric([pair.verifier_id, pair.drafter_id], pair.draft_tokens)
        yield lengths
