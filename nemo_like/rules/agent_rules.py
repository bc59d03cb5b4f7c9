"""Rules on agents: what their environments need, and what of a run they do not go with."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.environments.options import EnvConfig
from nemo_like.models.model_info import has_vision_tower


def agent_problems(cfg: Config, name: str, env: EnvConfig) -> Iterator[Problem]:
    """Yield every problem with the environment ``name``, which runs agents."""
    yield from _options(name, env)
    prefix = f"env.{name}"
    if env.check_at_start:
        yield Problem(
            key=f"{prefix}.check_at_start=true",
            rule="has nothing to ask an agent about: there is no response before the policy is there",
            remedy="set it to false",
        )
    if env.max_turns != 1:
        yield Problem(
            key=f"{prefix}.max_turns={env.max_turns}",
            rule="would do nothing: an agent decides how often it calls",
            remedy=f"set it to 1; {prefix}.options.max_calls is the limit of an agent",
        )
    if env.batch_size != 1:
        yield Problem(
            key=f"{prefix}.batch_size={env.batch_size}",
            rule="must be 1 for agents: the sessions of one call would wait for each other",
            remedy=f"{prefix}.max_concurrency says how many sessions a process has at once",
        )
    yield from _features(cfg, f"{prefix}.kind=agent")


def _options(name: str, env: EnvConfig) -> Iterator[Problem]:
    options, prefix = env.options, f"env.{name}.options"
    has_agent, has_command = bool(options.get("agent")), bool(options.get("command"))
    if has_agent == has_command:
        yield Problem(
            key=f"{prefix}.agent={options.get('agent')}",
            rule="and options.command exclude each other, and one of them must say what runs",
            remedy="agent: package.module:name for a function or a class, command: [program, argument] else",
        )
    timeout_s = options.get("timeout_s")
    if isinstance(timeout_s, int | float) and not timeout_s < env.timeout_s:
        yield Problem(
            key=f"{prefix}.timeout_s={timeout_s:g}",
            rule=f"must be below env.{name}.timeout_s={env.timeout_s:g}, after which the process is replaced",
            remedy=f"set env.{name}.timeout_s to {timeout_s + 30:g}",
        )
    if options.get("tool_choice") not in ("auto", "required"):
        yield Problem(
            key=f"{prefix}.tool_choice={options.get('tool_choice')}",
            rule="must be auto or required",
            remedy="",
        )


def _features(cfg: Config, key: str) -> Iterator[Problem]:
    """Yield what of a run agents do not go with."""
    if has_vision_tower(cfg.policy.model_name):
        yield Problem(
            key=key,
            rule=f"serves text, and policy.model_name={cfg.policy.model_name} reads images",
            remedy="use a model without a vision tower, or an environment of kind custom",
        )
    policy = cfg.policy
    has_critic, has_teacher = cfg.value is not None, cfg.teacher is not None
    branches = "the branches of a session lie end to end in one packed row"
    own_rows = "it reads a session's row as one sequence, and not branch by branch"
    refused: dict[str, tuple[object, object, str]] = {
        "policy.sequence_packing.enabled": (policy.sequence_packing.enabled, True, branches),
        "policy.sequence_packing.share_prompts": (policy.sequence_packing.share_prompts, False, branches),
        "policy.megatron_cfg.context_parallel_size": (policy.megatron_cfg.context_parallel_size, 1, branches),
        "loss_fn.use_kl_in_reward": (cfg.loss_fn.use_kl_in_reward, False, own_rows),
        "value": ("default" if has_critic else None, None, own_rows),
        "teacher": ("default" if has_teacher else None, None, own_rows),
        "grpo.max_staleness": (cfg.grpo.max_staleness, 0, "all calls of a session are of one policy version"),
        "policy.megatron_cfg.router_replay": (
            policy.megatron_cfg.router_replay,
            False,
            "what an engine gives for the tokens that it reads is not kept over the calls of a session",
        ),
    }
    for name, (value, wanted, why) in refused.items():
        if value != wanted:
            shown = str(value).lower()
            to = "null" if wanted is None else str(wanted).lower()
            yield Problem(
                key=f"{name}={shown}",
                rule=f"does not go with {key}: {why}",
                remedy=f"set it to {to}",
            )
