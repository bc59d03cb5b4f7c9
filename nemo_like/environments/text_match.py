"""Rewards that compare text: exact match, F1 over words, a regular expression."""

from __future__ import annotations

import re
import string
from collections import Counter
from functools import partial

from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.kinds.exact_match import ExactMatchOptions
from nemo_like.environments.kinds.regex import RegexOptions
from nemo_like.environments.latex_quantities import plain_quantity
from nemo_like.environments.per_turn import PerTurnEnvironment, extract_answer
from nemo_like.environments.shared_options import MatchOptions, NoOptions

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def arithmetic(options: NoOptions) -> PerTurnEnvironment:
    """Make an environment that gives 1 for exactly the reference answer; a truncated response earns 0."""
    return PerTurnEnvironment(_judge_arithmetic)


def exact_match(options: ExactMatchOptions) -> PerTurnEnvironment:
    """Make an environment that gives 1 for the reference answer, ignoring spaces around it; a number with its
    unit may be typeset by LaTeX or plain."""
    return PerTurnEnvironment(partial(_judge_exact_match, options=options))


def f1(options: MatchOptions) -> PerTurnEnvironment:
    """Make an environment that gives the F1 score of the answer's words against the reference's words."""
    return PerTurnEnvironment(
        lambda turn: Feedback(
            {"f1": f1_score(extract_answer(turn.response, options.answer_pattern) or "", turn.answer)}
        )
    )


def regex(options: RegexOptions) -> PerTurnEnvironment:
    """Make an environment that gives 1 when the pattern is found in the response."""
    pattern = re.compile(options.pattern, re.DOTALL)
    return PerTurnEnvironment(
        lambda turn: Feedback({"regex": float(pattern.search(turn.response) is not None)})
    )


def _judge_arithmetic(turn: Turn) -> Feedback:
    return Feedback({"exact_match": float(not turn.is_truncated and turn.response == turn.answer)})


def _judge_exact_match(turn: Turn, options: ExactMatchOptions) -> Feedback:
    found = extract_answer(turn.response, options.answer_pattern)
    if found is None or (options.must_end and turn.is_truncated):
        return Feedback({"exact_match": 0.0})
    found, wanted = plain_quantity(found.strip()), plain_quantity(turn.answer.strip())
    if options.ignore_case:
        found, wanted = found.casefold(), wanted.casefold()
    return Feedback({"exact_match": float(found == wanted)})


def f1_score(answer: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall over words, as multisets; 1 when both are empty.

    Words as in the SQuAD evaluation (arXiv 1606.05250): lower case, without punctuation and articles.
    """
    found, wanted = _words(answer), _words(reference)
    if not found or not wanted:
        return float(found == wanted)
    num_shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * num_shared / (len(found) + len(wanted))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
