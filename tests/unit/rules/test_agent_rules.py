"""What a run with agents needs, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.plan.machine_rules import Machine
from nemo_like.rules.rules import validate

Agents = Callable[..., Config]


@pytest.fixture
def with_agents(resolved_demo: Path, tmp_path: Path, checkpoint: Path) -> Agents:
    """The demo, whose problems an agent works on."""

    def load(*overrides: str) -> Config:
        path = tmp_path / "top.yaml"
        path.write_text(
            f"defaults: [{resolved_demo}, {{env@env.task: agent}}]\ndata: {{train: {{env: task}}}}\n"
        )
        there = [f"policy.model_name={checkpoint}", f"logger.log_dir={tmp_path / 'runs'}"]
        return load_config(path, [*there, "env.task.options.agent=a:b", *overrides])

    return load


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("policy.sequence_packing.share_prompts=false",),
        ("policy.megatron_cfg.context_parallel_size=2", "policy.data_parallel_size=1"),
        ("value=default", "grpo.adv_estimator.name=gae", "grpo.skip_idle_samples=false"),
        (
            "grpo.adv_estimator.name=reinforce_plus_plus",
            "loss_fn.use_kl_in_reward=true",
            "loss_fn.reference_policy_kl_penalty=0.01",
            "loss_fn.use_generation_logprobs_as_prev=false",
        ),
    ],
)
def test_an_agent_goes_with_the_demo(with_agents: Agents, overrides: tuple[str, ...]) -> None:
    validate(with_agents(*overrides), Machine.another)


def test_a_session_of_a_critic_lies_in_a_packed_row_too(with_agents: Agents) -> None:
    critic = ("value=default", "grpo.adv_estimator.name=gae", "grpo.skip_idle_samples=false")
    unpacked = ("value.sequence_packing.enabled=false", "value.sequence_packing.share_prompts=false")
    with pytest.raises(ConfigError, match=r"value\.sequence_packing\.enabled=false does not go with"):
        validate(with_agents(*critic, *unpacked), Machine.another)


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        ("env.task.options.command=[ls]", "env.task.options.agent=a:b", "command: [program, argument]"),
        ("env.task.options.agent=null", "env.task.options.agent=None", "for a function or a class"),
        ("env.task.options.agent=nowhere", "env.task.options.agent=nowhere", "package.module:name"),
        ("env.task.options.timeout_s=200", "env.task.options.timeout_s=200", "env.task.timeout_s to 230"),
        ("env.task.options.tool_choice=maybe", "env.task.options.tool_choice=maybe", ""),
        ("env.task.options.max_calls=0", "env.task.options.max_calls=0", ""),
        ("env.task.check_at_start=true", "env.task.check_at_start=true", "set it to false"),
        ("env.task.max_turns=4", "env.task.max_turns=4", "options.max_calls"),
        ("env.task.batch_size=8", "env.task.batch_size=8", "max_concurrency"),
        ("policy.sequence_packing.enabled=false", "policy.sequence_packing.enabled=false", "set it to true"),
        ("grpo.max_staleness=1", "grpo.max_staleness=1", "set it to 0"),
    ],
)
def test_what_does_not_go_with_agents_is_refused_by_name(
    with_agents: Agents, override: str, key: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(with_agents(override), Machine.another)
    told = [str(problem) for problem in caught.value.problems]
    assert any(key in one and remedy in one for one in told), told
