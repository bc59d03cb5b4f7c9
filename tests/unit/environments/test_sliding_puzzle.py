from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.environments.kinds.sliding_puzzle import num_misplaced, slide, solved
from tests.unit.environments.asking import ask, turn

SOLVED = "12\n3-"


@pytest.mark.parametrize(
    ("board", "moves", "after"),
    [
        ("12\n-3", "l", SOLVED),  # 3 slides left into the blank
        ("1-\n32", "u", SOLVED),  # 2 slides up
        (SOLVED, "d", "1-\n32"),  # 2 slides down
        (SOLVED, "r", "12\n-3"),  # 3 slides right
        (SOLVED, "l", SOLVED),  # nothing to the right of the blank
        (SOLVED, "u", SOLVED),
        ("-1\n32", "lu", SOLVED),
        ("12\n-3", "x7 l?", SOLVED),  # other characters mean nothing
        ("123\n4-5", "l", "123\n45-"),
    ],
)
def test_a_move_slides_a_tile_into_the_blank(board, moves, after):
    assert slide(board, moves) == after


@given(st.text("udlr", max_size=30))
def test_every_move_can_be_taken_back(moves):
    back = {"u": "d", "d": "u", "l": "r", "r": "l"}
    board, taken = SOLVED, []
    for move in moves:
        if (after := slide(board, move)) != board:
            taken.append(move)
            board = after
    assert slide(board, "".join(back[move] for move in reversed(taken))) == SOLVED


def test_the_solved_board_has_the_tiles_in_order_and_the_blank_last():
    assert solved("31\n-2") == SOLVED
    assert solved("-54\n321") == "123\n45-"
    assert num_misplaced(SOLVED) == 0
    assert num_misplaced("21\n3-") == 2


@pytest.mark.parametrize("board", ["12\n34", "1-\n3-", "12\n-"])
def test_a_board_without_one_blank_or_of_uneven_rows_is_refused(board):
    with pytest.raises(ValueError, match="must be rows of one length with one blank"):
        slide(board, "u")


def test_a_board_that_is_not_solved_is_shown_and_kept_for_the_next_turn():
    (feedback,) = ask("sliding_puzzle", turn("u", data={"board": "-1\n32"}, is_last=False))
    assert feedback.observation == "\n31\n-2\n"
    assert feedback.state == "31\n-2"
    assert not feedback.is_done


def test_a_solved_board_ends_the_game():
    (feedback,) = ask("sliding_puzzle", turn("u", data={"board": "-1\n32"}, state="1-\n32", is_last=False))
    assert feedback.is_done
    assert feedback.rewards == {"solved": 1.0}


def test_progress_is_the_share_of_misplaced_tiles_that_came_home():
    lost = turn("d", data={"board": "-1\n32"}, state="1-\n32")  # nothing below the blank's row moves down
    assert ask("sliding_puzzle", lost)[0].rewards == {"solved": 0.0}
    # At the start 1 and 2 are misplaced, now 2 alone.
    (feedback,) = ask("sliding_puzzle", lost, progress_reward=0.5)
    assert feedback.rewards == {"solved": 0.0, "progress": 0.25}
