"""Forests of token runs, and samples that have tokens in common in one row."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.batch.forest import ROOT, Forest, ForestRow, Origin, Outputs, PathPiece, TokenRun
from tests.unit.batch.forests import forest_from, forests, path_of

# Six tokens; three that follow token 2; one that follows token 7; a root of two.
FOREST = Forest((TokenRun(6), TokenRun(3, 2), TokenRun(1, 7), TokenRun(2)))
PARENTS = [ROOT, 0, 1, 2, 3, 4, 2, 6, 7, 7, ROOT, 10]


def test_a_run_goes_on_until_a_token_follows_another_than_the_one_before_it() -> None:
    assert forest_from(PARENTS).parents() == FOREST.parents() == PARENTS
    assert forest_from(PARENTS) == FOREST
    # Here the second run follows the token before it.
    assert forest_from(Forest((TokenRun(2), TokenRun(3, 1))).parents()).runs == (TokenRun(5),)


def test_paths_depths_and_leaves() -> None:
    assert FOREST.num_tokens == 12
    assert FOREST.starts == (0, 6, 9, 10)
    assert FOREST.depths() == [0, 3, 5, 0]
    assert FOREST.paths() == [
        [PathPiece(0, 6)],
        [PathPiece(0, 3), PathPiece(6, 9)],
        [PathPiece(0, 3), PathPiece(6, 8), PathPiece(9, 10)],
        [PathPiece(10, 12)],
    ]
    assert FOREST.leaves() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([TokenRun(2), TokenRun(0, 1)], "run 1 has 0 tokens"),
        ([TokenRun(2), TokenRun(3, 2)], "run 1 follows token 2, which is not before its first, token 2"),
        ([TokenRun(2, -2)], "run 0 follows token -2"),
    ],
)
def test_a_token_that_is_not_there_or_comes_later_is_followed_by_none(
    runs: list[TokenRun], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Forest(tuple(runs))


@given(forests())
def test_runs_say_what_parents_say(forest: Forest) -> None:
    parents = forest.parents()
    assert forest_from(parents).parents() == parents
    assert forest.depths() == [len(path_of(start, parents)) - 1 for start in forest.starts]
    for run, start, path in zip(forest.runs, forest.starts, forest.paths(), strict=True):
        assert list(chain(*(range(*piece) for piece in path))) == path_of(start + run.length - 1, parents)


@given(forests())
def test_leaves_reach_every_token_and_none_is_on_the_path_of_another(forest: Forest) -> None:
    paths = forest.paths()
    reached = [set(chain(*(range(*piece) for piece in paths[leaf]))) for leaf in forest.leaves()]
    assert set().union(*reached) == set(range(forest.num_tokens))
    assert not any(one < other for one in reached for other in reached)


def test_samples_of_a_prompt_lie_in_a_row_by_hand() -> None:
    """A prompt of three tokens with answers of two, none and one; then a sample with another prompt."""
    alone = [Forest((TokenRun(length),)) for length in (5, 3, 4, 2)]
    row = ForestRow.of(alone, shared=[0, 2, 2, 0], num_entering=[4, 2, 3, 1])
    assert row.forest.runs == (TokenRun(4), TokenRun(1, 1), TokenRun(1))
    assert row.origins == (Origin(0, 0), Origin(2, 2), Origin(3, 0))
    assert row.outputs == (
        Outputs(0, 0, 5, ROOT, 0),
        Outputs(1, 2, 1, 1, 4),
        Outputs(2, 2, 2, 1, 4),
        Outputs(3, 0, 2, ROOT, 5),
    )


def test_a_session_that_begins_like_another_lies_in_a_row_by_hand() -> None:
    """Both begin with tokens 0 to 2. The second goes on at token 1 of its own, which is the first's."""
    first = Forest((TokenRun(5), TokenRun(2, 3)))
    second = Forest((TokenRun(4), TokenRun(2, 1), TokenRun(3, 3)))
    row = ForestRow.of([first, second], shared=[0, 3], num_entering=[6, 8])
    assert row.forest.runs == (TokenRun(5), TokenRun(1, 3), TokenRun(1, 2), TokenRun(2, 1), TokenRun(2, 6))
    assert row.origins == (Origin(0, 0), Origin(0, 5), Origin(1, 3), Origin(1, 4), Origin(1, 6))
    assert row.outputs[-1] == Outputs(1, 6, 3, 6, 9)


def test_no_more_is_shared_than_the_first_runs_have() -> None:
    samples = [Forest((TokenRun(2), TokenRun(4, 0))), Forest((TokenRun(5),))]
    with pytest.raises(ValueError, match="3 tokens are shared with the sample before, of which 2 tokens"):
        ForestRow.of(samples, shared=[0, 3], num_entering=[5, 4])


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[Forest], list[int], list[int]]:
    forest_list = draw(st.lists(forests(), min_size=1, max_size=4))
    entering = [max(1, one.num_tokens - draw(st.integers(0, 1))) for one in forest_list]
    shared = [0]
    for one, other, of_one, of_other in zip(
        forest_list, forest_list[1:], entering, entering[1:], strict=False
    ):
        most = min(one.runs[0].length, other.runs[0].length, of_one, of_other)
        shared.append(draw(st.integers(0, most)))
    return forest_list, shared, entering


@given(samples())
def test_every_token_of_a_row_has_the_path_of_its_sample(
    drawn: tuple[list[Forest], list[int], list[int]],
) -> None:
    """Tokens are (sample, token), where a shared one counts as that of the first sample that has it."""
    alone, shared, entering = drawn
    row = ForestRow.of(alone, shared, entering)

    def first_of(sample: int, token: int) -> tuple[int, int]:
        while token < shared[sample]:
            sample -= 1
        return sample, token

    token_in: list[tuple[int, int]] = []  # of each slot
    for run, (sample, token) in zip(row.forest.runs, row.origins, strict=True):
        token_in += [(sample, token + number) for number in range(run.length)]
    expected = {first_of(sample, token) for sample, count in enumerate(entering) for token in range(count)}
    assert set(token_in) == expected
    assert len(token_in) == len(expected)
    parents = row.forest.parents()
    for slot, (sample, token) in enumerate(token_in):
        path = [first_of(sample, one) for one in path_of(token, alone[sample].parents())]
        assert [token_in[one] for one in path_of(slot, parents)] == path
    predicted = [
        ((one.sample, one.first_token + number), one.first_slot if number == 0 else one.slot + number - 1)
        for one in row.outputs
        for number in range(one.num_tokens)
    ]
    assert sorted(token for token, _ in predicted) == [
        (sample, token) for sample, one in enumerate(alone) for token in range(shared[sample], one.num_tokens)
    ]
    for (sample, token), slot in predicted:
        parent = alone[sample].parents()[token]
        assert slot == ROOT if parent == ROOT else token_in[slot] == first_of(sample, parent)
