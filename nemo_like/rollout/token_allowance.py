"""``TokenAllowance``: how many tokens the samples of a rollout ahead of its step may have by now.

rollout of step 7, begun in step 5, 100 tokens per step:
    step 5   every sample up to token 100
    step 6   up to token 200
    step 7   no limit
"""

from __future__ import annotations


class TokenAllowance:
    """Grants the samples of one rollout ``max_tokens_per_step`` tokens for each step before the rollout's
    own, and no limit in its own.

    Every request ends at a multiple of ``max_tokens_per_step``, even when more tokens are granted. So the
    requests to the engines depend on the tokens alone, not on when a step began.
    """

    def __init__(self, max_tokens_per_step: int | None, *, begun_in: int, step: int) -> None:
        """Grant the tokens of step ``begun_in`` to a rollout for ``step``.

        A rollout that begins in its own step has no limit, nor has one without ``max_tokens_per_step``.
        """
        self._per_step = max_tokens_per_step if begun_in < step else None
        self._begun_in, self._step = begun_in, step
        self._now = begun_in

    def begin_step(self, step: int) -> None:
        """Grant the tokens of ``step``; the steps before it must have been granted."""
        self._now = max(self._now, step)

    def is_spent(self, num_tokens: int) -> bool:
        """Return whether a sample that has generated ``num_tokens`` must wait for a later step."""
        if self._per_step is None or self._now >= self._step:
            return False
        return num_tokens >= self._per_step * (self._now - self._begun_in + 1)

    def next_piece(self, num_tokens: int) -> int | None:
        """Return the most tokens that a sample's next request may ask for, when it has ``num_tokens``; None:
        no limit."""
        return None if self._per_step is None else self._per_step - num_tokens % self._per_step
