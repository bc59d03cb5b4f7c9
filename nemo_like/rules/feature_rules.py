"""Checks which features of a run exclude agents, and which exclude speculative decoding."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.environments.registry import kind_of
from nemo_like.generation.draft_rules import draft_problems
from nemo_like.generation.speculation import KEY, speculation
from nemo_like.models.model_info import has_vision_tower
from nemo_like.plan.roles import worker_groups
from nemo_like.policy.groups.layout import is_one_engine
from nemo_like.rollout.tasks import (
    has_grammars,
    task_environments,
    training_sampling,
    used_environments,
    validation_sampling,
)


def agent_run_problems(cfg: Config) -> Iterator[Problem]:
    """Yield a problem for each feature of the run that the agents of its environments exclude."""
    for name, env in used_environments(cfg).items():
        if kind_of(env).calls_policy:
            yield from _features(cfg, f"env.{name}.kind={env.kind}")


def _features(cfg: Config, key: str) -> Iterator[Problem]:
    """Yield a problem for each feature of the run that excludes agents, for the agent that ``key`` names."""
    if has_vision_tower(cfg.policy.model_name):
        yield Problem(
            key=key,
            rule=f"serves text, and policy.model_name={cfg.policy.model_name} reads images",
            remedy="use a model without a vision tower, or an environment that is no agent",
        )
    branches = "a session, in which calls go on from one another, lies in one packed row"
    refused: dict[str, tuple[object, object, str]] = {
        **{
            f"{role.group}.sequence_packing.enabled": (group.sequence_packing.enabled, True, branches)
            for role, group in worker_groups(cfg).items()
            if not is_one_engine(group)
        },
        "grpo.max_staleness": (cfg.grpo.max_staleness, 0, "all calls of a session are of one policy version"),
    }
    for name, (value, wanted, why) in refused.items():
        if value != wanted:
            shown = str(value).lower()
            yield Problem(
                key=f"{name}={shown}",
                rule=f"does not go with {key}: {why}",
                remedy=f"set it to {str(wanted).lower()}",
            )


def speculation_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem of speculative decoding, and of features of the run that exclude it."""
    if cfg.rollout.replay is not None:
        return
    yield from draft_problems(cfg.generation, cfg.policy)
    if speculation(cfg.generation) is None:
        return
    agents = {name: env.kind for name, env in used_environments(cfg).items() if kind_of(env).calls_policy}
    masked = "has log-probs corrected for what masked a token, one token at a time"
    refused = {
        f"env.{', '.join(agents)}.kind={', '.join(dict.fromkeys(agents.values()))}": (bool(agents), masked),
        "generation.structured_outputs": (has_grammars(cfg) and not agents, masked),
        "policy.megatron_cfg.router_replay=true": (
            cfg.policy.megatron_cfg.router_replay,
            "records the experts of every token, and those of a draft may be of tokens that are not kept",
        ),
        f"policy.model_name={cfg.policy.model_name}": (
            has_vision_tower(cfg.policy.model_name),
            "reads images: what keeps their tokens from being sampled is a logits processor, which vLLM's "
            "first model runner refuses beside drafts, and nothing here has looked at its second",
        ),
    }
    for key, (is_there, why) in refused.items():
        if is_there:
            yield Problem(key=key, rule=why, remedy=f"leave {KEY} out")
    reported = set()
    for env in task_environments(cfg):
        for sourced in (training_sampling(cfg, env), validation_sampling(cfg, env)):
            key = f"{sourced.keys['min_p']}={sourced.sampling.min_p:g}"
            if sourced.sampling.min_p > 0 and key not in reported:
                reported.add(key)
                rule = f"is refused by vLLM beside {KEY}, since drafts are kept without it"
                yield Problem(key=key, rule=rule, remedy=f"set it to 0, or leave {KEY} out")
