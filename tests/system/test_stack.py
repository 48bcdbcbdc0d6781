"""The stack as an operator sees it: ready line, admin port, metrics, drain, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from system_stack import PACELINE, running, wait_until

pytestmark = pytest.mark.timeout(300)
CONTRACT_RECEIPT = {
    "request_id", "model", "seed", "exact", "synthetic", "verifiers", "drafters", "rounds",
    "undrafted_rounds", "drafted_tokens", "verified_tokens", "accepted_tokens", "pruned_tokens",
    "late_tokens", "trimmed_tokens", "accepted_by_position", "draft_length_histogram", "wait_ms",
    "min_race_margin", "resumes", "reasons", "predicted", "observed",
}  # fmt: skip


def test_ready_line_and_state_file_agree(null_stack: Any) -> None:
    assert null_stack.ready["event"] == "ready"
    roles = sorted(p["role"] for p in null_stack.ready["processes"])
    assert [r for r in roles if r != "redis"] == ["drafter", "gateway", "policy", "verifier"]
    assert null_stack.state()["http"] == null_stack.http
    for process in null_stack.state()["processes"]:
        os.kill(process["pid"], 0)
        if process["role"] != "redis":
            assert httpx.get(f"{process['admin']}/health").status_code == 200
            assert "# TYPE" in httpx.get(f"{process['admin']}/metrics").text


def test_receipt_and_admin_views(null_stack: Any) -> None:
    answer = null_stack.chat("hello", max_tokens=40, seed=3)
    receipt = answer["speculation"]
    assert set(receipt) >= CONTRACT_RECEIPT
    assert receipt["drafted_tokens"] == (
        receipt["verified_tokens"]
        + receipt["pruned_tokens"]
        + receipt["late_tokens"]
        + receipt["trimmed_tokens"]
    )
    assert receipt["seed"] == 3
    assert len(answer["choices"][0]["token_ids"]) == 40
    assert receipt["accepted_tokens"] + receipt["rounds"] >= 40
    view = httpx.get(f"{null_stack.admin}/requests/{receipt['request_id']}").json()
    assert view["receipt"]["request_id"] == receipt["request_id"]
    assert len(view["rounds"]) == receipt["rounds"]
    assert sum(r["accepted"] for r in view["rounds"]) == receipt["accepted_tokens"]
    assert set(view["terms_s"]) == {"prefill", "draft", "verify", "network", "queue"}
    assert {"neighbours", "break_even_rps"} <= set(view)
    wait_until(lambda: len(httpx.get(f"{null_stack.admin}/fleet").json()["workers"]) == 2)
    fleet = httpx.get(f"{null_stack.admin}/fleet").json()
    assert {w["role"] for w in fleet["workers"]} == {"verifier", "drafter"}
    assert set(fleet["workers"][0]) >= {
        "id", "role", "state", "pid", "running", "sessions", "blocks_used", "slowdown_observed", "alpha",
        "last_report_age_s",
    }  # fmt: skip
    metrics = httpx.get(f"{null_stack.admin}/metrics").text
    assert 'vllm:generation_tokens_total{model_name="' in metrics


def test_the_plan_comes_from_measurement(timed_stack: Any) -> None:
    """TPOT(k) = (20 + (rtt + k)) / (k + 1) ms falls with every k up to 16 here, so k_max is best."""

    def planned() -> bool:
        timed_stack.chat("measure", max_tokens=64)
        reasons = timed_stack.chat("measure", max_tokens=64)["speculation"]["reasons"]
        return "best" in reasons

    wait_until(planned, timeout_s=90)
    receipt = timed_stack.chat("measure", max_tokens=64)["speculation"]
    lengths = {int(k): n for k, n in receipt["draft_length_histogram"].items()}
    assert max(lengths, key=lambda k: lengths[k]) == 8, receipt
    assert receipt["predicted"]["tpot_ms"] > 0
    assert receipt["predicted"]["tpot_ms"] == pytest.approx(receipt["observed"]["tpot_ms"], rel=0.5)
    fleet = httpx.get(f"{timed_stack.admin}/fleet").json()
    assert [w["alpha"] for w in fleet["workers"] if w["role"] == "verifier"] == [pytest.approx(1.0)]
    assert [pair["k"] for pair in fleet["pairs"]] == [8]


def test_drafting_off_is_not_slower_than_on_by_choice(timed_stack: Any) -> None:
    """With a perfect drafter 64 tokens take about 64/9 rounds of 20 + 9 ms instead of 64 steps of 20 ms."""
    on = timed_stack.chat("speed", max_tokens=64)["speculation"]["observed"]["tpot_ms"]
    off = timed_stack.chat("speed", max_tokens=64, speculation={"enabled": False, "receipt": True})
    assert on < 0.5 * off["speculation"]["observed"]["tpot_ms"]


def test_same_seed_same_null_tokens_with_drafting_off(null_stack: Any) -> None:
    on = null_stack.chat("seeded", max_tokens=64, seed=9)
    off = null_stack.chat("seeded", max_tokens=64, seed=9, speculation={"enabled": False})
    assert on["choices"][0]["token_ids"] == off["choices"][0]["token_ids"]


def test_synthetic_acceptance_is_forced_and_marked(null_stack: Any) -> None:
    body = {"worker": "all", "acceptance": 0.5}
    assert httpx.post(f"{null_stack.admin}/testing", json=body).status_code == 200
    try:
        verified = accepted = 0
        for seed in range(8):
            receipt = null_stack.chat("synthetic", max_tokens=200, seed=seed)["speculation"]
            assert receipt["synthetic"] is True
            by_position = receipt["accepted_by_position"]
            accepted += by_position[0] if by_position else 0
            verified += receipt["rounds"] - receipt["undrafted_rounds"]
        # Acceptance at the first position is Bernoulli(1/2) over `verified` rounds.
        assert verified > 200
        assert abs(accepted / verified - 0.5) < 5 * 0.5 / verified**0.5
    finally:
        httpx.post(f"{null_stack.admin}/testing", json={"worker": "all", "acceptance": -1})
    assert null_stack.chat("real", max_tokens=8)["speculation"]["synthetic"] is False


def test_stop_leaves_no_process_socket_or_file(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running(run_dir, {"engine.engine": "null", "drafters": [{"id": "d0", "kind": "ngram"}]}) as stack:
        pids = [p["pid"] for p in stack.state()["processes"]]
        assert stack.chat("hi", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert stack.stop() == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    left = [p for p in run_dir.rglob("*") if p.is_socket() or p.suffix in {".lock", ".pid"}]
    assert left == []


def test_testing_is_refused_in_normal_serving(tmp_path: Path) -> None:
    settings = {"engine.engine": "null", "drafters": []}
    with running(tmp_path / "run", settings, testing=False) as stack:
        response = httpx.post(f"{stack.admin}/testing", json={"worker": "all", "slowdown": 2})
        assert response.status_code == 403
        assert stack.chat("hi", max_tokens=4)["speculation"]["drafted_tokens"] == 0


def test_a_wrong_key_stops_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [PACELINE, "up", "--run-dir", str(tmp_path / "run"), "--set", "gateway.prot=1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "gateway.prot" in done.stderr
    assert done.stdout == ""


def test_supervised_stack_dies_with_its_supervisor(tmp_path: Path) -> None:
    with running(tmp_path / "run", {"engine.engine": "null", "drafters": []}) as stack:
        pids = [p["pid"] for p in stack.state()["processes"]]
        stack.process.send_signal(signal.SIGKILL)
        stack.process.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_config_show_is_what_serves() -> None:
    done = subprocess.run(
        [PACELINE, "config", "show", "--json", "--set", "verifiers.v0.dtype=float32"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["verifiers"][0]["dtype"] == "float32"
