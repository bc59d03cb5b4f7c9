"""What a run writes of its configuration: no value of an environment variable, and no password."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nemo_like.config.loader import to_dict, to_yaml
from nemo_like.config.problems import ConfigError
from nemo_like.config.secrets import as_written, is_masked, masked, reference_of, referring
from nemo_like.configuration import Config, load_config
from nemo_like.environments.kinds.http import HttpOptions
from nemo_like.environments.registry import options_of
from nemo_like.rules.rules import validate

DEMO = Path(__file__).resolve().parents[3] / "configs" / "grpo_arithmetic_cpu.yaml"
TOKEN = "hunter2-hunter2"

Load = Callable[..., Config]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.setenv("OWN_TOKEN", TOKEN)
    monkeypatch.setenv("OWN_NUMBER", "7")
    return lambda *arguments: load_config(DEMO, arguments)


def read_back(cfg: Config, tmp_path: Path) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(cfg))
    return load_config(path)


@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        (["logger.wandb.notes=${oc.env:OWN_TOKEN}"], ("logger", "wandb", "notes"), "${oc.env:OWN_TOKEN}"),
        (
            ["logger.wandb.notes='a ${oc.env:OWN_TOKEN}'"],
            ("logger", "wandb", "notes"),
            "a ${oc.env:OWN_TOKEN}",
        ),
        (
            ["logger.mlflow.tracking_uri='http://u:${oc.env:OWN_TOKEN}@h/'"],
            ("logger", "mlflow", "tracking_uri"),
            "http://u:${oc.env:OWN_TOKEN}@h/",
        ),
        (
            ["vars.own=${oc.env:OWN_TOKEN}", "logger.wandb.notes=${vars.own}"],
            ("logger", "wandb", "notes"),
            "${vars.own}",
        ),
        (
            ["vars.own=${oc.env:OWN_TOKEN}", "logger.wandb.notes=${vars.own}"],
            ("vars", "own"),
            "${oc.env:OWN_TOKEN}",
        ),
        (
            ["logger.wandb.notes='${oc.env:NOT_THERE,${oc.env:OWN_TOKEN}}'"],
            ("logger", "wandb", "notes"),
            "${oc.env:NOT_THERE,${oc.env:OWN_TOKEN}}",
        ),
        (
            ["vars.own={token: ${oc.env:OWN_TOKEN}}", "env.arithmetic.options=${vars.own}"],
            ("env", "arithmetic", "options"),
            "${vars.own}",
        ),
        (
            ["env.arithmetic.options={headers: [a, ${oc.env:OWN_TOKEN}]}"],
            ("env", "arithmetic", "options", "headers"),
            ["a", "${oc.env:OWN_TOKEN}"],
        ),
        (
            ["logger.wandb.tags='${oc.decode:\"[${oc.env:OWN_TOKEN}]\"}'"],
            ("logger", "wandb", "tags"),
            '${oc.decode:"[${oc.env:OWN_TOKEN}]"}',
        ),
    ],
)
def test_a_text_from_the_environment_is_used_but_written_as_what_asked_for_it(
    load: Load, tmp_path: Path, arguments: list[str], key: tuple[str, ...], text: object
) -> None:
    cfg = load(*arguments)
    written: object = to_dict(cfg)
    for name in key:
        assert isinstance(written, dict)
        written = written[name]
    assert written == text
    assert TOKEN in repr(asdict(cfg)) and TOKEN not in to_yaml(cfg)
    again = read_back(cfg, tmp_path)
    assert again == cfg and to_yaml(again) == to_yaml(cfg)


def test_a_written_configuration_takes_the_variable_that_is_set_when_it_is_read(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = load("logger.wandb.notes=${oc.env:OWN_TOKEN}")
    monkeypatch.setenv("OWN_TOKEN", "another")
    assert read_back(cfg, tmp_path).logger.wandb.notes == "another"
    monkeypatch.delenv("OWN_TOKEN")
    with pytest.raises(ConfigError, match=r"logger\.wandb\.notes=.*'OWN_TOKEN' not found"):
        read_back(cfg, tmp_path)


def test_numbers_and_choices_from_the_environment_are_written_as_they_were(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_DEVICE", "cpu")
    cfg = load(
        "grpo.seed=${oc.env:OWN_NUMBER}",
        "policy.device=${oc.env:OWN_DEVICE}",
        "logger.trace_steps='${oc.decode:\"[${oc.env:OWN_NUMBER}]\"}'",
    )
    written = to_dict(cfg)
    assert (written["grpo"]["seed"], written["policy"]["device"]) == (7, "cpu")
    assert written["logger"]["trace_steps"] == [7]


def test_a_source_cannot_come_whole_from_the_environment(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"data\.train=.* cannot come whole from the environment \(OWN_T"):
        load("vars.own={name: ${oc.env:OWN_TOKEN}}", "data.train=${vars.own}")


def test_options_keep_where_their_texts_come_from(load: Load) -> None:
    url = "https://h/${oc.env:OWN_TOKEN}"
    cfg = load("env@env.far=http", f"env.far.options.url='{url}'")
    options = options_of(cfg.env["far"])
    assert isinstance(options, HttpOptions)
    assert (options.url, as_written(options.url)) == (f"https://h/{TOKEN}", url)


@pytest.mark.parametrize("value", ["text", ["a", "b"], {"a": ["b"]}])
def test_what_came_from_the_environment_remembers_it_in_other_processes(value: object) -> None:
    given = referring(value, "${x}")
    for copy in (pickle.loads(pickle.dumps(given)), deepcopy(given)):
        assert copy == value and reference_of(copy) == "${x}"


def test_a_problem_with_a_text_from_the_environment_does_not_show_it(load: Load) -> None:
    cfg = load("env@env.far=http", "env.far.options.url=${oc.env:OWN_TOKEN}", "data.default.env=far")
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    assert TOKEN not in str(caught.value)
    assert "env.far.options.url=${oc.env:OWN_TOKEN} must start with http:// or https://" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:secret@host:80/path", "http://me:***@host:80/path"),
        ("postgresql+psycopg2://me:p@ss@host/base", "postgresql+psycopg2://me:***@host/base"),
        ("mysql://me:sl/ash@host/base", "mysql://me:***@host/base"),
        ("http://:secret@host", "http://:***@host"),
        ("it said: POST http://a:b@h gave 500", "it said: POST http://a:***@h gave 500"),
        ("https://host/x?a=1&api_key=abc&b=2", "https://host/x?a=1&api_key=***&b=2"),
        ("https://host/?X-Amz-Security-Token=abc", "https://host/?X-Amz-Security-Token=***"),
        ("https://host/x?max_tokens=5&keyboard=us", "https://host/x?max_tokens=5&keyboard=us"),
        ("http://[::1]:8000/users/@me", "http://[::1]:8000/users/@me"),
        ("http://me:${oc.env:PASSWORD}@host", "http://me:${oc.env:PASSWORD}@host"),
        ("http://host:8000/users/me@there", "http://host:8000/users/me@there"),
        ("http://host:8000", "http://host:8000"),
        ("http://me@host/", "http://me@host/"),
        ("mail me@host: 3", "mail me@host: 3"),
    ],
)
def test_passwords_in_urls_are_masked_and_nothing_else(text: str, expected: str) -> None:
    assert masked(text) == expected
    assert masked(expected) == expected
    assert is_masked(expected) == ("***" in expected)


def test_a_configuration_is_written_without_the_passwords_of_its_urls_and_not_taken_so(
    load: Load, tmp_path: Path
) -> None:
    cfg = load("logger.mlflow.tracking_uri='http://me:secret@host/'")
    assert cfg.logger.mlflow.tracking_uri == "http://me:secret@host/"
    assert "tracking_uri: http://me:***@host/" in to_yaml(cfg)
    rule = r"logger\.mlflow\.tracking_uri=http://me:\*\*\*@host/ has a mask in the place of a password"
    with pytest.raises(ConfigError, match=rule):
        read_back(cfg, tmp_path)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("a$\\{}x:", max_size=12))
@example("a\\\\${x}${oc.env:OWN_TOKEN}")
def test_a_text_that_looks_like_an_interpolation_reads_back_as_itself(tmp_path: Path, text: str) -> None:
    cfg = load_config(DEMO)
    cfg.logger.wandb.notes = text
    assert read_back(cfg, tmp_path).logger.wandb.notes == text
