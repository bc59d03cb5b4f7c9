"""How many tokens a sample may have in which step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nemo_like.rollout.token_allowance import TokenAllowance


def test_each_step_grants_as_many_tokens_and_the_rollouts_own_step_all() -> None:
    allowance = TokenAllowance(100, begun_in=5, step=7)
    spent_at = []
    for step in (5, 6, 7):
        allowance.begin_step(step)
        spent_at.append([num for num in (99, 100, 199, 200, 1000) if allowance.is_spent(num)])
    assert spent_at == [[100, 199, 200, 1000], [200, 1000], []]


def test_requests_end_at_multiples_whatever_is_granted() -> None:
    allowance = TokenAllowance(100, begun_in=5, step=7)
    assert [allowance.next_piece(num) for num in (0, 30, 99, 100, 150)] == [100, 70, 1, 100, 50]
    allowance.begin_step(7)
    assert [allowance.next_piece(num) for num in (0, 30, 250)] == [100, 70, 50]


def test_a_rollout_that_begins_in_its_own_step_has_no_limit() -> None:
    for allowance in (TokenAllowance(100, begun_in=7, step=7), TokenAllowance(None, begun_in=5, step=7)):
        assert not allowance.is_spent(1000)
        assert allowance.next_piece(1000) is None


@given(
    per_step=st.integers(1, 50),
    ahead=st.integers(1, 4),
    length=st.integers(1, 300),
    begins=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_the_pieces_of_a_response_do_not_depend_on_when_steps_begin(
    per_step: int, ahead: int, length: int, begins: list[bool]
) -> None:
    """A response of ``length`` tokens, with steps that begin after some of its pieces."""

    def pieces(steps_begin: list[bool]) -> list[int]:
        allowance, step, num_tokens, sizes = TokenAllowance(per_step, begun_in=1, step=1 + ahead), 1, 0, []
        ends = iter(steps_begin)
        while num_tokens < length:
            while allowance.is_spent(num_tokens):
                step += 1
                allowance.begin_step(step)
            size = min(allowance.next_piece(num_tokens) or length, length - num_tokens)
            sizes.append(size)
            num_tokens += size
            if next(ends, False):
                step += 1
                allowance.begin_step(step)
        assert step <= 1 + ahead + sum(steps_begin)
        return sizes

    assert pieces(begins) == pieces([])
