"""schemathesis against the whole stack: bodies made from the API's own description, valid and not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
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


@pytest.fixture
def described(null_stack: Any) -> Any:
    return schemathesis.openapi.from_url(f"{null_stack.http}/openapi.json")


schema = schemathesis.pytest.from_fixture("described")


@schema.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_described(case: Any) -> None:
    if isinstance(case.body, dict) and case.body.get("max_tokens") is None and "messages" in case.body:
        case.body["max_tokens"] = 4
    if isinstance(case.body, dict) and case.body.get("max_tokens") is None and "prompt" in case.body:
        case.body["max_tokens"] = 4
    case.call_and_validate(checks=CHECKS, timeout=60)


def test_the_stack_is_well_afterwards(null_stack: Any) -> None:
    assert httpx.get(f"{null_stack.http}/readiness").status_code == 200
    assert null_stack.chat("still here", max_tokens=3)["usage"]["completion_tokens"] == 3
