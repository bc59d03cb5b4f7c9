"""``TokenAllowance``: how many tokens the samples of a rollout that runs ahead may have by now.

rollout of step 7, begun in step 5, 100 tokens per step:
    step 5   every sample up to token 100
    step 6   up to token 200
    step 7   as many as it takes
"""

from __future__ import annotations


class TokenAllowance:
    """Grants the samples of one rollout ``max_tokens_per_step`` tokens for each step that comes before the
    rollout's own, and in its own as many as they need.

    A request for tokens ends at a multiple of ``max_tokens_per_step`` also where more is granted: so what is
    asked of the engines follows from the tokens alone, and not from when a step began.
    """

    def __init__(self, max_tokens_per_step: int | None, *, begun_in: int, step: int) -> None:
        """Begin with what step ``begun_in`` grants a rollout for ``step``.

        A rollout that begins in its own step has no limit, nor has one without ``max_tokens_per_step``.
        """
        self._per_step = max_tokens_per_step if begun_in < step else None
        self._begun_in, self._step = begun_in, step
        self._now = begun_in

    def begin_step(self, step: int) -> None:
        """Grant what ``step`` grants; the steps before it have done so."""
        self._now = max(self._now, step)

    def is_spent(self, num_tokens: int) -> bool:
        """Return whether a sample that has generated ``num_tokens`` must wait for a later step."""
        if self._per_step is None or self._now >= self._step:
            return False
        return num_tokens >= self._per_step * (self._now - self._begun_in + 1)

    def next_piece(self, num_tokens: int) -> int | None:
        """Return for how many tokens to ask next at most, when a sample has ``num_tokens``; None: any."""
        return None if self._per_step is None else self._per_step - num_tokens % self._per_step
