"""The tasks of a run: their environments, sampling and limits; a task is a named environment with its data.

The config groups that rollouts read are here too, as Protocols.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Protocol

from nemo_like.algorithms.options import GRPOConfig, LossConfig
from nemo_like.cluster.options import ClusterConfig
from nemo_like.data.options import DataConfig
from nemo_like.data.sources import data_sources
from nemo_like.driver.options import EvaluationConfig
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import component_weights, kind_of, last_judge, options_of
from nemo_like.environments.shared_options import AgentOptions, Credit
from nemo_like.generation.options import GenerationConfig, SamplingConfig
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.observability.options import LoggerConfig
from nemo_like.policy.options import PolicyConfig, SequencePackingConfig, TeacherConfig, ValueConfig
from nemo_like.rollout.options import RolloutConfig
from nemo_like.tripwires.options import DebugConfig


class TaskConfigGroups(Protocol):
    """The config groups that say which tasks a run has, and how their responses are sampled."""

    @property
    def data(self) -> DataConfig: ...
    @property
    def env(self) -> dict[str, EnvConfig]: ...
    @property
    def generation(self) -> GenerationConfig: ...
    @property
    def policy(self) -> PolicyConfig: ...
    @property
    def value(self) -> ValueConfig | None: ...
    @property
    def teacher(self) -> TeacherConfig | None: ...


@dataclass(frozen=True, slots=True)
class SourcedSampling:
    """One task's sampling settings, and the keys that decided them.

    ``keys[name]`` is the full configuration key that decided field ``name``.
    """

    sampling: SamplingSettings
    keys: dict[str, str]


def max_prompt_tokens(cfg: TaskConfigGroups) -> int:
    """Return how many tokens a prompt may have; the run leaves out longer prompts."""
    limit = cfg.data.max_input_seq_length
    return limit or cfg.policy.max_total_sequence_length - cfg.generation.max_new_tokens


def task_environments(cfg: TaskConfigGroups) -> dict[str, EnvConfig]:
    """Return the environments that data sources name, in the order of ``env``, without unknown names."""
    named = {source.env for _, source in data_sources(cfg.data)}
    return {name: env for name, env in cfg.env.items() if name in named}


def training_tasks(cfg: TaskConfigGroups) -> list[str]:
    """Return the names of the environments of the training data, in the order of its sources."""
    return list(dict.fromkeys(source.env for source in cfg.data.train))


def judging_environments(cfg: TaskConfigGroups, task: str) -> dict[str, EnvConfig]:
    """Return the environments whose actors judge a task's responses.

    This is the task's own environment; for a weighted sum, its components; for tools of MCP, its own and the
    judge of the last response. Names that ``env`` lacks are left out.
    """
    env = cfg.env[task]
    judge = last_judge(env)
    if judge is not None:
        if judge not in cfg.env or last_judge(cfg.env[judge]) is not None:
            return {task: env}
        return {task: env, judge: cfg.env[judge], **judging_environments(cfg, judge)}
    if kind_of(env).components is None:
        return {task: env}
    return {name: cfg.env[name] for name in component_weights(env) if name in cfg.env}


def used_environments(cfg: TaskConfigGroups) -> dict[str, EnvConfig]:
    """Return the environments that data sources name, the components of weighted sums, and the judges of
    environments with tools, in the order of ``env``, without unknown names."""
    tasks = task_environments(cfg)
    used = tasks.keys() | {name for task in tasks for name in judging_environments(cfg, task)}
    return {name: env for name, env in cfg.env.items() if name in used}


def has_agents(cfg: TaskConfigGroups) -> bool:
    """Return whether agents call the policy; engines then need a tokenizer, and rollouts an endpoint."""
    return any(kind_of(env).calls_policy for env in used_environments(cfg).values())


def training_sampling(cfg: TaskConfigGroups, env: str) -> SourcedSampling:
    """Return how a task's training samples are drawn.

    Values come from ``generation``, unless ``env.<name>.sampling`` overrides them.
    """
    return _resolve(cfg, [(f"env.{env}.sampling", cfg.env[env].sampling)])


def validation_sampling(cfg: TaskConfigGroups, env: str) -> SourcedSampling:
    """Return how a task's validation samples are drawn.

    Values are those of training, unless ``generation.validation`` overrides them;
    ``env.<name>.validation_sampling`` overrides both.
    """
    return _resolve(
        cfg,
        [
            (f"env.{env}.sampling", cfg.env[env].sampling),
            ("generation.validation", cfg.generation.validation),
            (f"env.{env}.validation_sampling", cfg.env[env].validation_sampling),
        ],
    )


def has_stop_strings(cfg: TaskConfigGroups) -> bool:
    """Return whether any task's responses may end with a stop string; engines then need a tokenizer."""
    return any(
        resolve(cfg, env).sampling.stop_strings
        for env in task_environments(cfg)
        for resolve in (training_sampling, validation_sampling)
    )


def has_grammars(cfg: TaskConfigGroups) -> bool:
    """Return whether the responses of any task, or of an agent's calls, may follow a grammar."""
    return has_agents(cfg) or any(
        resolve(cfg, env).sampling.structured_outputs is not None
        for env in task_environments(cfg)
        for resolve in (training_sampling, validation_sampling)
    )


def _resolve(cfg: TaskConfigGroups, layers: list[tuple[str, SamplingConfig]]) -> SourcedSampling:
    names = [field.name for field in fields(SamplingSettings)]
    values = {name: getattr(cfg.generation, name) for name in names}
    keys = {name: f"generation.{name}" for name in names}
    for prefix, layer in layers:
        for name in names:
            if (value := getattr(layer, name)) is not None:
                values[name], keys[name] = value, f"{prefix}.{name}"
    values["top_k"] = values["top_k"] or 0
    values |= {name: tuple(values[name]) for name in ("stop_strings", "stop_token_ids")}
    grammar = values["structured_outputs"]
    values["structured_outputs"] = json.dumps(grammar, sort_keys=True) if grammar else None
    return SourcedSampling(SamplingSettings(**values), keys)


def response_limit(cfg: TaskConfigGroups, task: str) -> int:
    """Return the most tokens that the policy can generate in a training sample of a task.

    This is ``max_new_tokens`` for each turn, or for each call of an agent, and never more than a sample can
    hold.
    """
    env = cfg.env[task]
    num_turns, total = env.max_turns, env.max_conversation_tokens or cfg.policy.max_total_sequence_length
    if kind_of(env).calls_policy:
        options: AgentOptions = options_of(env)
        num_turns = options.max_calls
        if options.credit is Credit.session:
            total = session_limit(cfg)
    return min(num_turns * training_sampling(cfg, task).sampling.max_new_tokens, total)


def task_with_limit_of_a_turn(cfg: TaskConfigGroups, num_tokens: int) -> str | None:
    """Return a training task whose limit for one turn, or for one call of an agent, is ``num_tokens``
    although a sample may have more; None when no task is so. A user who gives this number as a limit of
    samples has taken a turn for a sample."""
    for task in training_tasks(cfg):
        if task not in cfg.env:
            continue
        if num_tokens == training_sampling(cfg, task).sampling.max_new_tokens < response_limit(cfg, task):
            return task
    return None


def session_limit(cfg: TaskConfigGroups) -> int:
    """Return how many distinct tokens an agent's session may have: as many as any worker group's micro-batch
    holds."""
    groups = filter(None, (cfg.policy, cfg.value, cfg.teacher))
    packings = [group.sequence_packing for group in groups]
    return min(
        *(packing.logprob_mb_tokens for packing in packings),
        *(one.train_mb_tokens for one in packings if isinstance(one, SequencePackingConfig)),
    )


class RolloutConfigGroups(TaskConfigGroups, Protocol):
    """The config groups that ``SyncRolloutActor`` reads."""

    @property
    def grpo(self) -> GRPOConfig: ...
    @property
    def loss_fn(self) -> LossConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def logger(self) -> LoggerConfig: ...
    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def debug(self) -> DebugConfig: ...
    @property
    def evaluation(self) -> EvaluationConfig | None: ...
