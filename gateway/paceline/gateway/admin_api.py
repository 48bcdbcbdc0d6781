"""The gateway's own routes on the admin port: fleet, finished requests, drain, forced behaviour."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from paceline.core.errors import ErrorKind, PacelineError, invalid
from paceline.core.types import WorkerRole, WorkerState
from paceline.gateway.endpoint import paceline_error
from paceline.gateway.request import Choice, GatewayRequest
from paceline.gateway.service import Gateway
from paceline.v1 import policy_pb2, worker_pb2
from paceline.wire.config import testing_allowed
from paceline.wire.convert import worker_role_from_proto, worker_state_from_proto

_TESTING_FIELDS = ("slowdown", "acceptance", "rtt_ms")
JSON = dict[str, Any]


class AdminApi:
    """Handlers over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> Sequence[BaseRoute]:
        return (
            Route("/fleet", _typed(self._fleet)),
            Route("/requests/{id}", _typed(self._request)),
            Route("/workers/{id}/drain", _typed(self._drain), methods=["POST"]),
            Route("/testing", _typed(self._testing), methods=["POST"]),
        )

    async def _fleet(self, _: Request) -> Response:
        """The policy's view merged with what this gateway sees itself; the latter alone if it is dead."""
        gateway, policy = self._gateway, self._gateway.policy
        await policy.refresh()
        reported = {status.id: status for status in policy.workers}
        workers = []
        for link in gateway.fleet.links.values():
            worker = _reported(reported.pop(link.id)) if link.id in reported else _unreported(link.id)
            worker["role"] = str(link.role)
            worker["state"] = str(link.state)
            worker["pid"] = link.pid or worker["pid"]
            if not policy.connected:
                worker["running"] = link.running
            if worker["last_report_age_s"] is None and link.seen_s is not None:
                worker["last_report_age_s"] = round(time.monotonic() - link.seen_s, 3)
            workers.append(worker)
        workers += [_reported(status) for status in reported.values()]
        pairs = [
            {
                "verifier": pair.verifier_id,
                "drafter": pair.drafter_id,
                "weight": pair.weight,
                "k": pair.draft_tokens,
                "predicted_tpot_ms": pair.predicted_tpot_ms,
            }
            for pair in policy.pairs
        ]
        age_s = policy.plan_age_s
        return JSONResponse(
            {"workers": workers, "pairs": pairs, "plan_age_s": None if age_s is None else round(age_s, 3)}
        )

    async def _request(self, request: Request) -> Response:
        """A finished request, or a live one as far as it is."""
        gateway, key = self._gateway, request.path_params["id"]
        found: GatewayRequest | None
        if key in ("last", "--last"):
            found = next(reversed(gateway.finished.values()), None)
        else:
            found = gateway.finished.get(key) or gateway.dispatcher.live.get(key)
        if found is None:
            raise PacelineError(ErrorKind.NOT_FOUND, f"no request {key!r} among the newest finished")
        view = _choice_view(found.choices[0])
        view.update(await self._explanation(found))
        if len(found.choices) > 1:
            view["choices"] = [_choice_view(choice) for choice in found.choices]
        if found.error is not None:
            view["error"] = found.error.kind.value
        return JSONResponse(view)

    async def _explanation(self, request: GatewayRequest) -> JSON:
        receipt = request.choices[0].receipt
        answer = await self._gateway.policy.explain(
            policy_pb2.ExplainRequest(
                verifier_id=request.verifier_id,
                drafter_id=receipt.drafters[-1][0] if receipt.drafters else "",
                prompt_tokens=len(request.job.prompt_token_ids),
                output_tokens=max(1, len(request.choices[0].token_ids)),
            )
        )
        if answer is None:
            return {"neighbours": [], "break_even_rps": None}
        return {
            "neighbours": [{"k": n.draft_tokens, "tpot_ms": n.tpot_ms} for n in answer.neighbours],
            "break_even_rps": answer.break_even_rps if answer.HasField("break_even_rps") else None,
        }

    async def _drain(self, request: Request) -> Response:
        """Takes the worker out of service at once; its running work ends in the background."""
        gateway = self._gateway
        link = gateway.fleet.link(request.path_params["id"])
        if link.described is None:
            raise PacelineError(ErrorKind.UNAVAILABLE, f"worker {link.id} is not connected")
        link.draining = True
        gateway.dispatcher.background(link.drain(gateway.settings.gateway.grace_s))
        return JSONResponse({"id": link.id, "state": str(WorkerState.DRAINING)})

    async def _testing(self, request: Request) -> Response:
        if not testing_allowed():
            raise PacelineError(ErrorKind.PERMISSION_DENIED, "testing: refused unless PACELINE_TESTING=1")
        message, worker = _testing_request(await request.body())
        fleet = self._gateway.fleet
        links = (
            [link for link in fleet.links.values() if link.described is not None]
            if worker == "all"
            else [fleet.link(worker)]
        )
        # A verifier and a drafter both can lengthen the way between them; asked of all, one side does.
        at_drafters = worker == "all" and any(link.role is WorkerRole.DRAFTER for link in links)
        for link in links:
            own = worker_pb2.SetTestingRequest()
            own.CopyFrom(message)
            if at_drafters and link.role is WorkerRole.VERIFIER:
                own.ClearField("rtt_ms")
            await link.set_testing(own)
        return JSONResponse({"workers": [link.id for link in links]})


def _typed(handler: Any) -> Any:
    async def handle(request: Request) -> Response:
        try:
            response: Response = await handler(request)
        except PacelineError as error:
            return await paceline_error(request, error)
        return response

    return handle


def _testing_request(body: bytes) -> tuple[worker_pb2.SetTestingRequest, str]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise PacelineError(ErrorKind.INVALID_ARGUMENT, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise PacelineError(ErrorKind.INVALID_ARGUMENT, "the body must be a JSON object")
    message = worker_pb2.SetTestingRequest()
    if value.get("acceptance", 0) is None:
        message.acceptance = -1.0  # null clears it, as a negative number does
    for name, setting in value.items():
        if setting is None or name == "worker":
            continue
        if name in _TESTING_FIELDS:
            if (
                isinstance(setting, bool)
                or not isinstance(setting, int | float)
                or not math.isfinite(setting)
            ):
                raise invalid(name, "must be a number")
            setattr(message, name, float(setting))
        elif name == "nan_request":
            if not isinstance(setting, str):
                raise invalid(name, "must be a request id")
            message.nan_request = setting
        else:
            raise invalid(name, "is not a known parameter")
    worker = value.get("worker", "all")
    if not isinstance(worker, str):
        raise invalid("worker", "must be a worker's id or 'all'")
    return message, worker


def _choice_view(choice: Choice) -> JSON:
    terms = choice.terms
    return {
        "receipt": choice.receipt.to_json(),
        "rounds": [
            {
                "k": r.k,
                "asked": r.asked,
                "arrived": r.arrived,
                "accepted": r.accepted,
                "waited_ms": r.waited_ms,
                "reason": r.reason,
            }
            for r in choice.rounds
        ],
        "terms_s": {
            "prefill": terms.prefill,
            "draft": terms.draft,
            "verify": terms.verify,
            "network": terms.network,
            "queue": terms.queue,
        },
    }


def _reported(status: policy_pb2.WorkerStatus) -> JSON:
    return {
        "id": status.id,
        "role": str(worker_role_from_proto(status.role)),
        "state": str(worker_state_from_proto(status.state)),
        "pid": status.pid,
        "running": status.running,
        "sessions": status.sessions,
        "blocks_used": status.blocks_used,
        "slowdown_observed": status.slowdown_observed,
        "alpha": status.alpha if status.HasField("alpha") else None,
        "last_report_age_s": round(status.last_report_age_s, 3),
    }


def _unreported(worker_id: str) -> JSON:
    return {
        "id": worker_id,
        "pid": 0,
        "running": 0,
        "sessions": 0,
        "blocks_used": 0,
        "slowdown_observed": 1.0,
        "alpha": None,
        "last_report_age_s": None,
    }
