"""schemathesis against the whole stack: bodies made from the API's own description, valid and not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.timeout(300)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


GENERATES = ("/v1/chat/completions", "/v1/completions")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_answer_is_described(null_stack: Any, mode: GenerationMode) -> None:
    # Without schemathesis' own pytest plugin, which this pytest is too new for.
    schema = schemathesis.openapi.from_url(f"{null_stack.http}/openapi.json")
    tested = []
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and operation.method.upper() == "GET":
            continue  # nothing there to get wrong

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def check(case: Any) -> None:
            if case.path in GENERATES and isinstance(case.body, dict):
                # A null engine never ends an answer by itself.
                case.body["max_tokens"] = case.body.get("max_tokens") or 4
            case.call_and_validate(checks=CHECKS, timeout=60)

        check()
        tested.append(operation.path)
    assert set(GENERATES) <= set(tested)


def test_the_stack_is_well_afterwards(null_stack: Any) -> None:
    assert httpx.get(f"{null_stack.http}/readiness").status_code == 200
    assert null_stack.chat("still here", max_tokens=3)["usage"]["completion_tokens"] == 3
