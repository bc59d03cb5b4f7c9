"""A reward for models with random weights: it differs within every group, so that there are gradients."""

from __future__ import annotations

from nemo_like.environments.interface import Turn


def share_of_even_words(turn: Turn) -> float:
    """Return the share of the response's words that end in an even digit; 0 for an empty response."""
    words = turn.response.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))
