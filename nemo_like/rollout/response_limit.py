"""How many tokens the policy may generate in one sample, over all its turns."""

from __future__ import annotations

from nemo_like.environments.registry import kind_of, options_of
from nemo_like.environments.shared_options import AgentOptions, Credit
from nemo_like.policy.options import PolicyConfig
from nemo_like.rollout.tasks import TaskGroups, training_sampling, training_tasks


def response_limit(cfg: TaskGroups, task: str) -> int:
    """Return the most tokens that the policy can generate in a training sample of a task.

    They are ``max_new_tokens`` for each turn, or for each call of an agent, and never more than a sample can
    hold.
    """
    env = cfg.env[task]
    num_turns, total = env.max_turns, env.max_conversation_tokens or cfg.policy.max_total_sequence_length
    if kind_of(env).calls_policy:
        options: AgentOptions = options_of(env)
        num_turns = options.max_calls
        if options.credit is Credit.session:
            total = session_limit(cfg.policy)
    return min(num_turns * training_sampling(cfg, task).sampling.max_new_tokens, total)


def task_with_limit_of_a_turn(cfg: TaskGroups, num_tokens: int) -> str | None:
    """Return a training task of whose turns, or calls of an agent, each may have ``num_tokens`` and a sample
    more; None where there is none. Such a number for samples was meant for one turn."""
    for task in training_tasks(cfg):
        if task not in cfg.env:
            continue
        if num_tokens == training_sampling(cfg, task).sampling.max_new_tokens < response_limit(cfg, task):
            return task
    return None


def session_limit(policy: PolicyConfig) -> int:
    """Return how many tokens all branches of an agent's session may have together: those of a micro-batch."""
    return min(policy.sequence_packing.train_mb_tokens, policy.sequence_packing.logprob_mb_tokens)
