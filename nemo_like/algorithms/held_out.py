"""Measures how well a policy solves held-out problems, from one or more answers to each.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from nemo_like.algorithms.error_bars import Estimate, over_answers, over_problems


@dataclass(frozen=True, slots=True)
class Answers:
    """The judged answers to one problem; both sequences have one entry per answer."""

    rewards: Sequence[float]
    answer_ids: Sequence[int]  # equal for answers that say the same


def held_out_metrics(problems: Sequence[Answers], num_answers: int, solved_at: float) -> dict[str, float]:
    """Return the values of ``held_out_estimates`` without their errors."""
    estimates = held_out_estimates(problems, num_answers, solved_at)
    return {name: estimate.value for name, estimate in estimates.items()}


def held_out_estimates(
    problems: Sequence[Answers], num_answers: int, solved_at: float
) -> dict[str, Estimate]:
    """Compute accuracy, mean reward and, with several answers per problem, pass@k, mean@k and majority@k.

    Accuracy is the share of answers that solve their problem: answers with a reward of at least
    ``solved_at``. ``num_answers`` answers were sampled for each problem. A problem with fewer
    judged answers counts only in the pass@k that it has at least k answers for; a pass@k that no problem
    has enough answers for is left out. The result is empty when no answer was judged.
    """
    judged = [problem for problem in problems if problem.rewards]
    if not judged:
        return {}
    solved = [[float(reward >= solved_at) for reward in problem.rewards] for problem in judged]
    rewards = over_answers([problem.rewards for problem in judged])
    estimates = {
        "accuracy": over_answers(solved).as_share(),
        "reward": rewards.as_share() if _are_shares(judged) else rewards,
    }
    if num_answers < 2:
        return estimates
    for k in _powers_of_two(num_answers):
        enough = [problem for problem in judged if len(problem.rewards) >= k]
        if enough:
            prompt_options = [
                pass_at_k(len(problem.rewards), _num_solved(problem, solved_at), k) for problem in enough
            ]
            estimates[f"pass@{k}"] = over_problems(prompt_options, _num_answers(enough)).as_share()
    estimates[f"mean@{num_answers}"] = over_problems(
        [fmean(answers) for answers in solved], _num_answers(judged)
    ).as_share()
    estimates[f"majority@{num_answers}"] = over_problems(
        [float(majority_reward(problem) >= solved_at) for problem in judged]
    ).as_share()
    return estimates


def pass_at_k(num_answers: int, num_solved: int, k: int) -> float:
    """Return the probability that k of the answers, drawn without replacement, include a right one.

    It is ``1 - C(n - c, k) / C(n, k)`` when c of n answers are right (arXiv 2107.03374). Raises ValueError
    unless 1 <= k <= n.
    """
    if not 1 <= k <= num_answers:
        raise ValueError(f"pass@{k} of {num_answers} answers: k must be from 1 to the number of answers")
    return 1.0 - comb(num_answers - num_solved, k) / comb(num_answers, k)


def majority_reward(problem: Answers) -> float:
    """Return the mean reward of the most frequent answer; of equally frequent answers the first counts."""
    votes: dict[int, list[float]] = {}
    for answer_id, reward in zip(problem.answer_ids, problem.rewards, strict=True):
        votes.setdefault(answer_id, []).append(reward)
    return _mean(max(votes.values(), key=len))


def _are_shares(problems: Sequence[Answers]) -> bool:
    """Return whether every reward is 0 or 1, so that their mean is a share of the answers."""
    return all(reward in (0.0, 1.0) for problem in problems for reward in problem.rewards)


def _num_answers(problems: Sequence[Answers]) -> int:
    return sum(len(problem.rewards) for problem in problems)


def _num_solved(problem: Answers, solved_at: float) -> int:
    return sum(reward >= solved_at for reward in problem.rewards)


def _powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... below the limit, and the limit."""
    powers = [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent < limit]
    return [*powers, limit]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
