"""Lists the jobs of a sweep before any of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from nemo_like.config.grammar import Override, alternative_texts
from nemo_like.config.problems import Problem

BASIC = "basic"  # Hydra's own sweeper


def interval_problems(arguments: Sequence[Override]) -> list[Problem]:
    """Return a problem for each argument with an interval, from which Hydra's own sweeper cannot choose."""
    return [
        Problem(
            key=str(argument.input_line),
            rule="gives no values that could be tried one by one",
            remedy="write them out, key=1,2, or add hydra/sweeper=optuna, which chooses some",
        )
        for argument in arguments
        if argument.is_sweep_override() and not argument.is_discrete_sweep()
    ]


def combinations(arguments: Sequence[Override]) -> list[list[str]]:
    """Return the arguments of each job as Hydra's own sweeper makes them, in its order."""
    return [list(job) for job in product(*_by_key(arguments))]


def possible_jobs(arguments: Sequence[Override]) -> list[list[str]]:
    """Return the arguments of example jobs, for a sweeper that chooses values while it runs.

    The first job has the first value of every argument; each further job changes one argument.
    """
    values = _by_key(arguments)
    first = [texts[0] for texts in values]
    further = [(index, text) for index, texts in enumerate(values) for text in texts[1:]]
    return [first, *([*first[:index], text, *first[index + 1 :]] for index, text in further)]


def _by_key(arguments: Sequence[Override]) -> list[list[str]]:
    """Return the alternatives of each key. Where several arguments set one key, the last counts."""
    return list({one.get_key_element(): alternative_texts(one) for one in arguments}.values())
