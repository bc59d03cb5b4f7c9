"""How many tokens the policy may generate in one sample, over all its turns."""

from __future__ import annotations

from nemo_like.environments.registry import kind_of, options_of
from nemo_like.environments.shared_options import AgentOptions, Credit
from nemo_like.policy.options import PolicyConfig
from nemo_like.rollout.tasks import TaskConfigGroups, training_sampling, training_tasks


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
            total = session_limit(cfg.policy)
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


def session_limit(policy: PolicyConfig) -> int:
    """Return how many tokens all branches of an agent's session may have together: as many as a micro-batch
    holds."""
    return min(policy.sequence_packing.train_mb_tokens, policy.sequence_packing.logprob_mb_tokens)
