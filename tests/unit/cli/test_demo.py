"""The variables of `make demo`."""

from __future__ import annotations

import pytest

from paceline.cli.demo import DEFAULT_PROMPT, parse
from paceline.wire.config import load_settings


def test_defaults() -> None:
    demo = parse({})
    settings = load_settings(None, (), demo.flags, environ={})
    assert settings.model.target == "smollm2-135m-instruct"
    assert settings.verifiers[0].effective_dtype == "bfloat16"
    assert not settings.verifiers[0].exact
    assert settings.gateway.port == 8000
    assert [d.kind for d in settings.drafters] == ["ngram"]
    assert settings.speculation.k == "auto"
    assert demo.request["messages"][0]["content"] == DEFAULT_PROMPT
    assert (demo.request["max_tokens"], demo.request["temperature"]) == (64, 0.0)
    assert "seed" not in demo.request
    assert not demo.oneshot


def test_empty_is_the_default() -> None:
    assert parse({"PORT": "", "K": " ", "SEED": ""}) == parse({})


def test_float32_is_exact() -> None:
    settings = load_settings(None, (), parse({"DTYPE": "float32"}).flags, environ={})
    assert settings.verifiers[0].exact
    assert settings.verifiers[0].effective_dtype == "float32"


def test_no_drafter_turns_drafting_off() -> None:
    settings = load_settings(None, (), parse({"DRAFTER": "none"}).flags, environ={})
    assert settings.drafters == ()
    assert not settings.speculation.enabled


@pytest.mark.parametrize(("given", "path"), [({}, "smollm2-135m-instruct"), ({"DRAFT_MODEL": "/d"}, "/d")])
def test_a_model_drafter_drafts_with_the_target_unless_told(given: dict[str, str], path: str) -> None:
    settings = load_settings(None, (), parse({"DRAFTER": "model", **given}).flags, environ={})
    assert (settings.drafters[0].kind, settings.drafters[0].path) == ("model", path)


def test_everything_given() -> None:
    demo = parse(
        {"ONESHOT": "1", "PROMPT": "it's $1", "PORT": "0", "SEED": "-7", "TEMPERATURE": "0.5", "K": "0"}
        | {"MAX_TOKENS": "3", "DRAFTER": "suffix"}
    )
    settings = load_settings(None, (), demo.flags, environ={})
    assert demo.oneshot
    assert demo.request["messages"][0]["content"] == "it's $1"
    assert (demo.request["seed"], demo.request["temperature"], demo.request["max_tokens"]) == (-7, 0.5, 3)
    assert (settings.gateway.port, settings.speculation.k, settings.drafters[0].kind) == (0, 0, "suffix")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ONESHOT", "yes"),
        ("PORT", "70000"),
        ("PORT", "http"),
        ("DTYPE", "int8"),
        ("SEED", str(2**63)),
        ("TEMPERATURE", "hot"),
        ("TEMPERATURE", "nan"),
        ("TEMPERATURE", "2.1"),
        ("MAX_TOKENS", "0"),
        ("DRAFTER", "oracle"),
        ("K", "17"),
        ("K", "-1"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: want "):
        parse({name: value})
