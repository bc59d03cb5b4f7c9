"""Environments, who names them, their options, and how each task is sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.environments import bubblewrap
from nemo_like.environments.options import ENVIRONMENT_KINDS
from nemo_like.environments.registry import options_of
from nemo_like.plan.machine_rules import Machine
from nemo_like.rollout.task_rules import task_problems
from nemo_like.rollout.tasks import has_grammars, training_sampling, used_environments, validation_sampling
from nemo_like.rules.rules import validate
from tests.unit.config.checkpoints import REPOSITORY

Demo = Callable[..., Config]
KINDS = list(ENVIRONMENT_KINDS.names())
# Keys that have no default.
MUST_SET = {
    "regex": ["pattern=x"],
    "function": ["function=a:b"],
    "custom": ["target=a:B"],
    "http": ["url=http://here"],
    "reward_model": ["model_name=/nowhere"],
    "judge": ["base_url=http://here/v1", "model=m"],
    "preference": ["base_url=http://here/v1", "model=m"],
    "gymnasium": ["env_id=FrozenLake-v1"],
    "textarena": ["env_id=TowerOfHanoi-v0"],
    "openenv": ["base_url=http://here"],
    "mcp": ["judge=arithmetic"],
}
# What a kind needs of the rest of a run.
RUN_NEEDS = {"agent": ["policy.sequence_packing.share_prompts=false"]}
# What a kind needs besides, though its key has a default.
NEEDED = {
    **MUST_SET,
    "weighted_sum": ["components={arithmetic: 1.0}"],
    "verifiers": ["env={taskset: {id: tasks}}"],
    "mcp": ["judge=arithmetic", "servers={tools: {command: [server]}}"],
    "agent": ["agent=a:b"],
}


def problems(cfg: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def with_env(resolved_demo: Path, tmp_path: Path, checkpoint: Path) -> Callable[..., Config]:
    """``with_env("regex", "options.pattern=x")``: the demo, judged by an environment named "task"."""

    def load(kind: str, *overrides: str) -> Config:
        path = tmp_path / "top.yaml"
        path.write_text(
            f"defaults: [{resolved_demo}, {{env@env.task: {kind}}}]\ndata: {{train: {{env: task}}}}\n"
        )
        there = [f"policy.model_name={checkpoint}", f"logger.log_dir={tmp_path / 'runs'}"]
        needed = RUN_NEEDS.get(kind, [])
        return load_config(path, [*there, *needed, *(f"env.task.{override}" for override in overrides)])

    return load


def test_every_kind_has_a_file_and_every_file_a_kind() -> None:
    files = {path.stem for path in (REPOSITORY / "configs" / "env").glob("*.yaml")} - {"default"}
    assert files == set(KINDS)


def test_every_kind_says_for_the_page_of_kinds_what_its_reward_is_and_gives_an_example() -> None:
    shown = {name: ENVIRONMENT_KINDS.load(name) for name in KINDS}
    assert [name for name, kind in shown.items() if not (kind.reward and kind.example)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_valid_with_its_defaults(with_env: Callable[..., Config], kind: str) -> None:
    cfg = with_env(kind, *(f"options.{key}" for key in NEEDED.get(kind, [])))
    validate(cfg, Machine.another)
    assert "task" in used_environments(cfg)
    options_of(cfg.env["task"])


def test_a_machine_without_the_sandbox_is_refused_with_the_remedy(
    with_env: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refusal() -> str:
        bubblewrap.bubblewrap_failure.cache_clear()
        (problem,) = problems(with_env("code"))
        assert problem.startswith("env.task.options.sandbox=required needs ")
        assert problem.endswith("; or set it to none, with which programs can do whatever this user can")
        validate(with_env("code", "options.sandbox=none"))
        validate(with_env("code"), Machine.another)
        return problem

    monkeypatch.setenv("PATH", str(tmp_path))
    assert "it is the package bubblewrap" in refusal()
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bwrap: No permissions >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    assert "which the system does not permit (bwrap: No permissions)" in refusal()
    bubblewrap.bubblewrap_failure.cache_clear()


@pytest.mark.parametrize("kind", ["gymnasium", "textarena", "openenv", "verifiers"])
def test_a_hub_without_its_interpreter_or_its_package_is_refused_with_the_remedy(
    with_env: Callable[..., Config], kind: str, tmp_path: Path
) -> None:
    needed = [f"options.{key}" for key in NEEDED[kind]]
    (missing,) = problems(with_env(kind, *needed, f"options.python={tmp_path / 'python'}"))
    assert "/python is no Python interpreter here; bash scripts/setup.sh --hubs makes .venv-hubs" in missing
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    (bare,) = problems(with_env(kind, *needed, f"options.python={tmp_path / 'python'}"))
    assert f"which kind={kind} needs; install it there" in bare
    validate(with_env(kind, *needed, f"options.python={tmp_path / 'nowhere'}"), Machine.another)


def test_a_server_of_tools_that_is_no_program_is_refused(with_env: Callable[..., Config]) -> None:
    servers = "options.servers={tools: {command: [no-such-program]}}"
    (problem,) = problems(with_env("mcp", servers, "options.judge=arithmetic"))
    assert "env.task.options.servers.tools.command names no program that is here: no-such-program" in problem


def test_the_judge_of_answers_after_tools_has_actors_too(with_env: Callable[..., Config]) -> None:
    needed = [f"options.{key}" for key in NEEDED["mcp"]]
    assert {"task", "arithmetic"} <= used_environments(with_env("mcp", *needed)).keys()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{kind: environment, env: task}", "data.train.options.size=None must be a number, at least 1"),
        (
            "{kind: environment, env: task, options: {size: 2, seed: -1}}",
            "data.train.options.seed=-1 must be",
        ),
        ("{kind: environment, env: task, options: {size: 2, sed: 1}}", "data.train.options.sed is no option"),
        ("{kind: environment, env: task, path: x, options: {size: 2}}", "data.train.path=x must be null"),
    ],
)
def test_problems_that_an_environment_makes_need_a_number(demo: Demo, source: str, said: str) -> None:
    cfg = demo(f"data.train={source.replace('task', 'arithmetic')}")
    assert any(said in problem for problem in problems(cfg))


@pytest.mark.parametrize("kind", MUST_SET)
def test_an_option_without_a_default_must_be_set(with_env: Callable[..., Config], kind: str) -> None:
    key = MUST_SET[kind][0].partition("=")[0]
    with pytest.raises(ConfigError, match=rf"env\.task\.options\.{key} has no value"):
        with_env(kind)


@pytest.mark.parametrize(
    ("kind", "override", "problem"),
    [
        ("verifiers", "options.env={id: x}", "env.task.options.env names no taskset"),
        ("textarena", "options.num_players=2", "opponent=null leaves 1 of the players without moves"),
        ("mcp", "options.judge=nobody", "env.task.options.judge=nobody is not an environment of this"),
        ("mcp", "options.judge=task", "env.task.options.judge=task is of kind mcp, which judges no single"),
        ("mcp", "max_turns=1", "env.task.max_turns=1 leaves no turn after a call of a tool"),
        ("mcp", "options.servers={tools: {args: [x]}}", "env.task.options.servers.tools has no command"),
        ("regex", "options.pattern='('", "env.task.options.pattern=( is no regular expression"),
        ("f1", "options.answer_pattern=x", "env.task.options.answer_pattern=x has no group 1"),
        ("f1", "options.anser_pattern=x", "is not a key of the configuration; did you mean answer_pattern?"),
        ("exact_match", "options.ignore_case=3", "env.task.options.ignore_case=3 must be true or false"),
        ("code", "options.timeout_s=0", "env.task.options.timeout_s=0.0 must be above 0"),
        ("code", "options.sandbox=maybe", "must be one of required, none"),
        ("code", "options.max_processes=0", "env.task.options.max_processes=0 must be above 0"),
        ("code", "options.network=none", "network is not a key of the configuration"),
        ("http", "options.url=there", "must start with http:// or https://"),
        ("function", "options.function=reward", "env.task.options.function=reward is no import path"),
        ("calculator", "options.result_template=x", "must contain {result}"),
        ("arithmetic", "options.x=1", "env.task.options.x is not a key of the configuration"),
        ("reward_model", "options.device=gpu", "must be one of cpu, cuda"),
        ("reward_model", "options.device=cuda", "device=cuda needs policy.device=cuda"),
        ("reward_model", "options.max_length=0", "env.task.options.max_length=0 must be above 0"),
        ("judge", "options.base_url=here", "must start with http:// or https://"),
        (
            "judge",
            "options.base_url=http://a/v1/chat/completions",
            "is the address of one method; name the API's root, which usually ends in /v1",
        ),
        ("judge", "options.prompt='rate {respons}'", "must contain {response}, or the judge does not see it"),
        ("judge", "options.prompt='rate {respons}'", "has {respons}, which stands for nothing; did you mean"),
        ("judge", "options.score_pattern=x", "env.task.options.score_pattern=x has no group 1"),
        ("judge", "options.max_score=0", "max_score=0 must be above min_score=0, and both finite"),
        ("judge", "options.temperature=-1", "env.task.options.temperature=-1 must be at least 0"),
        ("judge", "options.default_reward=nan", "env.task.options.default_reward=nan must be finite"),
        ("judge", "timeout_s=270", "must be above options.request_timeout_s x options.max_attempts = 270"),
        (
            "judge",
            "options.api_key_variable=NO_SUCH_KEY",
            "api_key_variable=NO_SUCH_KEY is no environment variable, or an empty one; export NO_SUCH_KEY",
        ),
        ("judge", "options.max_token=5", "is not a key of the configuration; did you mean max_tokens?"),
        ("preference", "options.prompt='{prompt} {first}'", "must contain {second}, or the judge"),
        ("weighted_sum", "num_actors=2", "env.task.num_actors=2 must be 0 for a weighted sum"),
        ("weighted_sum", "max_turns=2", "env.task.max_turns=2 must be 1 for a weighted sum"),
        ("weighted_sum", "options.components={}", "names no environment, so there is no reward"),
        (
            "weighted_sum",
            "options.components={aritmetic: 1}",
            "components.aritmetic is not an environment of this configuration, which has arithmetic, task; "
            "did you mean arithmetic?",
        ),
        ("weighted_sum", "options.components={task: 1}", "components.task is of kind weighted_sum, which"),
        ("weighted_sum", "options.components={arithmetic: inf}", "arithmetic=inf must be finite"),
        ("weighted_sum", "options.components={arithmetic: high}", "must be a number"),
        ("arithmetic", "num_actors=0", "env.task.num_actors=0 must be at least 1"),
        ("arithmetic", "max_turns=0", "env.task.max_turns=0 must be at least 1"),
        (
            "arithmetic",
            "max_failed_share=50",
            "env.task.max_failed_share=50.0 must be at least 0 and at most 1",
        ),
        ("arithmetic", "max_failed_share=nan", "env.task.max_failed_share=nan must be at least 0"),
        ("arithmetic", "timeout_s=inf", "env.task.timeout_s=inf must be above 0 and finite"),
        (
            "arithmetic",
            "max_conversation_tokens=100",
            "must be from 2 to policy.max_total_sequence_length=32",
        ),
        (
            "arithmetic",
            "sampling.max_new_tokens=40",
            "env.task.sampling.max_new_tokens=40 must be below the 32",
        ),
    ],
)
def test_what_is_wrong_with_an_environment_is_named(
    with_env: Callable[..., Config], kind: str, override: str, problem: str
) -> None:
    settings = [
        f"options.{key}" for key in NEEDED.get(kind, []) if not override.startswith(f"options.{key[:4]}")
    ]
    assert any(problem in found for found in problems(with_env(kind, *settings, override)))


def test_a_data_source_must_name_an_environment_that_is_there(demo: Demo) -> None:
    (problem,) = problems(demo("data.train.env=arithmetics"))
    assert problem == (
        "data.train.env=arithmetics is not an environment of this configuration, which has arithmetic; "
        "did you mean arithmetic?"
    )
    (problem,) = problems(demo("data.validation.env=math"))
    assert problem.endswith("add `- env@env.math: KIND` to its defaults; the kinds are in configs/env")


def test_a_mistyped_key_of_an_environment_proposes_the_nearest(resolved_demo: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean env\.arithmetic\.num_actors\?"):
        load_config(resolved_demo, ["env.arithmetic.num_actor=2"])


def test_an_environment_without_a_kind_is_incomplete(resolved_demo: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.other has no env\.other\.kind and \d+ more"):
        load_config(resolved_demo, ["++env.other.num_actors=2"])


# Sampling


def test_sampling_is_decided_by_the_most_particular_setting(demo: Demo) -> None:
    cfg = demo(
        "generation.max_new_tokens=4",
        "env.arithmetic.sampling.max_new_tokens=5",
        "env.arithmetic.sampling.stop_strings=[x]",
        "generation.stop_token_ids=[5]",
        "env.arithmetic.validation_sampling.stop_token_ids=[7,9]",
        "generation.validation.temperature=0.5",
        "generation.validation.top_k=10",
        "env.arithmetic.validation_sampling.temperature=0",
    )
    training, validation = training_sampling(cfg, "arithmetic"), validation_sampling(cfg, "arithmetic")
    assert training.sampling.max_new_tokens == validation.sampling.max_new_tokens == 5
    assert training.sampling.stop_strings == validation.sampling.stop_strings == ("x",)
    assert (training.sampling.stop_token_ids, validation.sampling.stop_token_ids) == ((5,), (7, 9))
    assert (training.sampling.temperature, training.sampling.top_k) == (1.0, 0)
    assert (validation.sampling.temperature, validation.sampling.top_k) == (0.0, 10)
    assert validation.keys["temperature"] == "env.arithmetic.validation_sampling.temperature"
    assert validation.keys["top_k"] == "generation.validation.top_k"


@pytest.mark.parametrize(
    ("argument", "neutral"),
    [
        ("generation.top_p=0.9", "1.0"),
        ("generation.top_k=10", "null"),
        ("generation.min_p=0.1", "0.0"),
        ("env.arithmetic.sampling.top_p=0.9", "1.0"),
        ("env.arithmetic.sampling.top_k=10", "0"),
        ("env.arithmetic.sampling.min_p=0.1", "0.0"),
    ],
)
def test_training_is_refused_where_the_engine_renormalises_and_the_trainer_does_not(
    demo: Demo, argument: str, neutral: str
) -> None:
    (problem,) = problems(demo(argument))
    assert problem.startswith(f"{argument} must be {neutral} in training: the engine's log-probs would be")


def test_training_has_one_temperature(demo: Demo) -> None:
    (problem,) = problems(demo("env.arithmetic.sampling.temperature=0.7"))
    assert problem.startswith(
        "env.arithmetic.sampling.temperature=0.7 must be generation.temperature=1 in training: the trainer"
    )


def test_validation_may_be_sampled_as_one_likes(demo: Demo) -> None:
    validate(
        demo(
            "generation.validation.temperature=0.3",
            "generation.validation.top_p=0.9",
            "generation.validation.top_k=10",
            "env.arithmetic.validation_sampling.min_p=0.1",
        )
    )


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("generation.validation.temperature=-0.5", "must be at least 0"),
        ("generation.validation.top_p=0.0", "must be above 0 and at most 1"),
        ("generation.validation.top_k=-1", "must be at least 0"),
        ("generation.validation.min_p=1.5", "must be at least 0 and at most 1"),
        ("generation.validation.max_new_tokens=0", "must be at least 1"),
        ("generation.validation.temperature=nan", "must be at least 0"),
    ],
)
def test_a_sampling_setting_outside_its_range_is_refused(demo: Demo, argument: str, rule: str) -> None:
    assert any(problem.startswith(f"{argument} {rule}") for problem in problems(demo(argument)))


def test_an_empty_stop_string_is_refused(demo: Demo) -> None:
    (problem,) = problems(demo("generation.stop_strings=['']"))
    assert "must be without an empty string" in problem


@pytest.mark.parametrize(
    ("argument", "key", "rule"),
    [
        ("generation.stop_token_ids=[5,64]", "generation.stop_token_ids", "has 64, which is no token"),
        (
            "env.arithmetic.validation_sampling.stop_token_ids=[99]",
            "env.arithmetic.validation_sampling.stop_token_ids",
            "has 99, which is no token of the model: vocab_size=64",
        ),
        ("generation.stop_token_ids=[-1]", "generation.stop_token_ids=(-1,)", "must be ids, at least 0"),
    ],
)
def test_a_stop_token_that_the_model_lacks_is_refused(demo: Demo, argument: str, key: str, rule: str) -> None:
    (problem,) = problems(demo(argument))
    assert problem.startswith(f"{key} {rule}")


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ("{regex: '[0-9]+'}", ""),
        ("{json: {type: object}}", ""),
        ("{choice: [a, b]}", ""),
        ("{regex: '[0-9'}", "generation.structured_outputs.regex='[0-9' is no regular expression: "),
        (
            "{regx: a}",
            "generation.structured_outputs has regx, and must have one of regex, json, choice, grammar",
        ),
        ("{regex: a, choice: [a]}", "generation.structured_outputs has choice, regex, and must have one of"),
        ("{choice: a}", "generation.structured_outputs.choice must be a list that is not empty"),
        ("{grammar: ''}", "generation.structured_outputs.grammar must be a str that is not empty"),
    ],
)
def test_a_grammar_has_one_form_of_its_type(demo: Callable[..., Config], grammar: str, told: str) -> None:
    found = [str(one) for one in task_problems(demo(f"++generation.structured_outputs={grammar}"))]
    assert len(found) == bool(told)
    assert all(one.startswith(told) for one in found)


def test_a_grammar_of_one_task_leaves_the_others_free(demo: Callable[..., Config]) -> None:
    cfg = demo(
        "generation.structured_outputs={choice: [a]}",
        "env.arithmetic.validation_sampling.structured_outputs={}",
    )
    assert training_sampling(cfg, "arithmetic").sampling.structured_outputs == '{"choice": ["a"]}'
    assert validation_sampling(cfg, "arithmetic").sampling.structured_outputs is None and has_grammars(cfg)
    assert not has_grammars(demo())
