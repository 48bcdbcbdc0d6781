"""Layers of the configuration and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from paceline.core.errors import ConfigError
from paceline.wire.addresses import admin_port, connect_address, listen_port
from paceline.wire.config import check_servable, is_setting, load_settings
from paceline.wire.settings import Settings


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "paceline.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(*assignments: str, environ: dict[str, str] | None = None, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(file, assignments, environ=environ or {})
    return str(caught.value)


def test_nothing_given_is_the_defaults() -> None:
    assert load_settings(environ={}) == Settings()


def test_each_layer_wins_over_the_next(tmp_path: Path) -> None:
    file = written(tmp_path, "queue: {max_requests: 1, max_tokens: 1, lease_s: 1}\ngateway: {grace_s: 1}\n")
    environ = {
        "PACELINE_QUEUE__MAX_TOKENS": "2",
        "PACELINE_QUEUE__LEASE_S": "2",
        "PACELINE_GATEWAY__GRACE_S": "2",
    }
    settings = load_settings(
        file, ["queue.lease_s=3", "gateway.grace_s=3"], {"gateway.grace_s": 4.0}, environ=environ
    )
    assert settings.queue.max_requests == 1
    assert settings.queue.max_tokens == 2
    assert settings.queue.lease_s == 3
    assert settings.gateway.grace_s == 4
    assert settings.gateway.max_n == Settings().gateway.max_n


def test_list_entries_are_named_by_id(tmp_path: Path) -> None:
    file = written(tmp_path, "verifiers: [{id: a}, {id: b}]\nclasses: [{name: fast}]\n")
    environ = {"PACELINE_VERIFIERS__A__THREADS": "3"}
    settings = load_settings(file, ["verifiers.b.dtype=float32", "classes.fast.ttft_ms=200"], environ=environ)
    assert [v.threads for v in settings.verifiers] == [3, 0]
    assert settings.verifier("b").effective_dtype == "float32"
    assert settings.classes[0].ttft_ms == 200


def test_a_whole_section_or_list_can_be_set() -> None:
    settings = load_settings(None, ["drafters=[]"], environ={"PACELINE_SPECULATION": "{k: 3, wait: never}"})
    assert settings.drafters == ()
    assert (settings.speculation.k, settings.speculation.wait) == (3, "never")


def test_engine_holds_for_verifiers_that_do_not_say_otherwise() -> None:
    settings = load_settings(
        None, ["engine.max_sequences=8", "verifiers=[{id: a}, {id: b, max_sequences: 4}]"], environ={}
    )
    assert [v.max_sequences for v in settings.verifiers] == [8, 4]


def test_the_engine_called_null_needs_no_quotes(tmp_path: Path) -> None:
    file = written(tmp_path, "verifiers: [{id: a, engine: null}]\ndrafters: [{id: d, kind: null}]\n")
    settings = load_settings(file, ["engine.engine=null"], environ={})
    assert (settings.engine.engine, settings.verifiers[0].engine, settings.drafters[0].kind) == ("null",) * 3


def test_exact_is_float32_unless_asked_otherwise() -> None:
    assert load_settings(None, ["engine.exact=true"], environ={}).verifier("v0").effective_dtype == "float32"
    settings = load_settings(None, ["engine.exact=true", "verifiers.v0.dtype=bfloat16"], environ={})
    assert settings.verifier("v0").effective_dtype == "bfloat16"


def test_an_empty_section_is_the_default(tmp_path: Path) -> None:
    assert load_settings(written(tmp_path, "engine:\nverifiers:\n"), environ={}) == Settings()
    assert load_settings(written(tmp_path, ""), environ={}) == Settings()


def test_settings_survive_a_file(tmp_path: Path) -> None:
    settings = load_settings(
        None, ["verifiers.v0.port=0", "speculation.k=2", "classes.default.tpot_ms=9"], environ={}
    )
    file = written(tmp_path, yaml.safe_dump(settings.model_dump(mode="json")))
    assert load_settings(file, environ={}) == settings


@pytest.mark.parametrize("section", sorted(Settings.model_fields))
def test_an_unknown_key_is_named_in_every_section(section: str) -> None:
    entry = {"verifiers": "verifiers.v0", "drafters": "drafters.d0", "classes": "classes.default"}
    key = f"{entry.get(section, section)}.no_such_key"
    assert refusal(f"{key}=1") == f"{key}: unknown key"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("nonsense.a=1", "nonsense: unknown key"),
        ("model.target=3", "model.target: input should be a valid string"),
        ("engine.engine=cuda", "engine.engine: input should be 'torch', 'vllm', 'null' or 'timed'"),
        ("engine.exact=1", "engine.exact: input should be a valid boolean"),
        ("engine.slowdown=0.5", "engine.slowdown: input should be greater than or equal to 1"),
        (
            "verifiers.v0.max_step_tokens=31",
            "verifiers.v0.max_step_tokens: input should be greater than or equal to 32",
        ),
        ("verifiers.v0.port=65536", "verifiers.v0.port: input should be less than or equal to 65535"),
        ("verifiers.v0.addr=nowhere", "verifiers.v0.addr: want host:port"),
        ("drafters.d0.kind=oracle", "drafters.d0.kind: input should be"),
        ("drafters.d0.kind=model", "drafters.d0.path: kind 'model' needs the draft model's path"),
        ("speculation.k=17", "speculation.k: want auto or an integer from 0 to 16"),
        ("speculation.k=some", "speculation.k: want auto or an integer from 0 to 16"),
        ("speculation.k=true", "speculation.k: want auto or an integer from 0 to 16"),
        ("speculation.mode=fast", "speculation.mode: input should be 'coupled' or 'rejection'"),
        ("control.kind=magic", "control.kind: input should be"),
        ("queue.lease_s=0", "queue.lease_s: input should be greater than 0"),
        ("queue.lease_s=.inf", "queue.lease_s: input should be a finite number"),
        ("gateway.port=eight", "gateway.port: input should be a valid integer"),
        ("policy.addr=policy", "policy.addr: want host:port"),
        (
            "classes.default.reserved_share=2",
            "classes.default.reserved_share: input should be less than or equal to 1",
        ),
        ("tenants.file=[]", "tenants.file: input should be a valid string"),
        ("tls.cert=1", "tls.cert: input should be a valid string"),
        ("supervise.restart=often", "supervise.restart: input should be a valid boolean"),
        ("supervise=3", "supervise: input should be"),
        ("testing.timed.rtt_ms=-1", "testing.timed.rtt_ms: input should be greater than or equal to 0"),
        ("verifiers=[]", "verifiers: at least one is needed"),
        ("verifiers=3", "verifiers: input should be a valid tuple"),
        ("verifiers=[3]", "verifiers.0: input should be"),
        ("verifiers.v9.dtype=float32", "verifiers.v9.dtype: verifiers has no entry with id 'v9'"),
        ("verifiers=[{id: a}, {id: a}]", "verifiers: every id must be unique"),
        ("verifiers=[{id: d0}]", "drafters: id 'd0' is also a verifier's"),
        ("classes=[]", "classes: at least one is needed"),
        ("model.target.deeper=1", "model.target: input should be a valid string"),
        ("model.target.a.b=1", "model.target: input should be a valid string"),
        ("model.name={", "model.name: value is not YAML"),
        ("model.name", "--set model.name: want KEY=VALUE"),
    ],
)
def test_a_refusal_names_the_key(assignment: str, message: str) -> None:
    assert refusal(assignment).startswith(message)


def test_a_value_has_no_keys(tmp_path: Path) -> None:
    file = written(tmp_path, "model: {target: m}\n")
    assert refusal("model.target.a=1", file=file) == "model.target.a: model.target has no key 'a'"
    assert refusal("model.target.a.b=1", file=file) == "model.target.a.b: model.target has no keys"


def test_an_engine_error_is_named_once() -> None:
    assert refusal("engine.threads=-1") == "engine.threads: input should be greater than or equal to 0"


def test_every_wrong_key_is_named() -> None:
    message = refusal("gateway.port=x", "queue.nope=1")
    assert "gateway.port: " in message
    assert "queue.nope: unknown key" in message


@pytest.mark.parametrize("text", ["- a\n", "3\n", "a: [\n"])
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    file = written(tmp_path, text)
    assert str(file) in refusal(file=file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "absent.yaml" in refusal(file=tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("assignment", "key"),
    [
        ("testing.synthetic_acceptance=0.5", "testing.synthetic_acceptance"),
        ("testing.timed.rtt_ms=2", "testing.timed"),
        ("engine.engine=timed", "verifiers.v0.engine: timed"),
        ("drafters.d0.kind=timed", "drafters.d0.kind: timed"),
    ],
)
def test_testing_needs_its_variable(assignment: str, key: str) -> None:
    assert refusal(assignment) == f"{key}: refused unless PACELINE_TESTING=1"
    load_settings(None, [assignment], environ={"PACELINE_TESTING": "1"})


def test_variables_of_others_are_ignored() -> None:
    environ = {
        "PACELINE_GATEWAY_PORT": "tcp://10.0.0.1:80",
        "PACELINE_CACHE_DIR": "/cache",
        "PACELINE_TESTING": "0",
        "GATEWAY__PORT": "1",
    }
    assert load_settings(environ=environ) == Settings()
    assert not any(is_setting(name) for name in environ)
    assert is_setting("PACELINE_GATEWAY__PORT")
    assert is_setting("PACELINE_QUEUE")


def test_an_unknown_key_in_the_environment_is_named() -> None:
    assert refusal(environ={"PACELINE_QUEUE__NOPE": "1"}) == "queue.nope: unknown key"


def test_addresses() -> None:
    settings = load_settings(
        None,
        ["verifiers=[{id: a}, {id: b, port: 7000, admin_port: 7001}, {id: c, addr: 'far:7002'}]"],
        environ={},
    )
    a, b, c = settings.verifiers
    assert (listen_port(a, "verifier"), admin_port(a, "verifier")) == (50051, 9051)
    assert (listen_port(b, "verifier"), admin_port(b, "verifier")) == (7000, 7001)
    assert listen_port(c, "verifier") == 7002
    assert connect_address(a, "verifier") == "127.0.0.1:50051"
    assert connect_address(b, "verifier") == "127.0.0.1:7000"
    assert connect_address(c, "verifier") == "far:7002"
    assert listen_port(settings.policy, "policy") == 50053


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("tls.cert=/c.pem", "tls.cert"),
        ("tenants.file=/t.yaml", "tenants.file"),
        ("speculation.mode=rejection", "speculation.mode: rejection"),
        ("control.kind=adaspec", "control.kind: adaspec"),
        ("engine.engine=vllm", "verifiers.v0.engine: vllm"),
        ("control.kind=fixed", "control.arg"),
    ],
)
def test_a_valid_value_that_cannot_be_served_is_refused_at_start_only(assignment: str, named: str) -> None:
    settings = load_settings(assignments=[assignment], environ={})
    with pytest.raises(ConfigError, match=named):
        check_servable(settings)


def test_values_without_effect_are_told() -> None:
    assert check_servable(Settings()) == []
    settings = load_settings(
        assignments=[
            "speculation.draft_ahead=true",
            "engine.compile=true",
            "classes=[{name: a, reserved_share: 0.5, shed_order: 1}]",
        ],
        environ={},
    )
    assert sorted(check_servable(settings)) == [
        "classes.a.reserved_share",
        "classes.a.shed_order",
        "speculation.draft_ahead",
        "verifiers.v0.compile",
    ]
