"""The kind ``sliding_puzzle``: tiles slide into the blank until 1 2 3 ... stand in order, the blank last.

A board is rows of characters, for example "31\\n2-". A move names where the blank's neighbour goes:
``u``, ``d``, ``l`` or ``r`` slides a tile up, down, left or right into the blank. A response is any
text; its moves are those letters, in order, and a move without a tile to slide changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.data.interface import TaskPrompt
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.kind import Kind, RecordCheck
from nemo_like.environments.per_turn import PerTurnEnvironment
from nemo_like.environments.record_needs import field_of

BLANK = "-"
# Where the tile that moves lies, seen from the blank: (rows down, columns right).
_TILE_FROM_BLANK = {"u": (1, 0), "d": (-1, 0), "l": (0, 1), "r": (0, -1)}


@dataclass(kw_only=True, slots=True)
class SlidingPuzzleOptions:
    board_key: Annotated[
        str, Key('the example\'s field with the first board: rows of text, the blank as "-"', "board")
    ]
    solved_reward: Annotated[float, Key("of a board that is solved", 1.0)]
    progress_reward: Annotated[
        float, Key("is multiplied by the share of the misplaced tiles that came to their places", 0.0)
    ]


def has_board(options: SlidingPuzzleOptions) -> RecordCheck:
    def check(task_prompt: TaskPrompt) -> None:
        slide(str(field_of(task_prompt, options.board_key, "options.board_key")), "")

    return check


KIND = Kind(
    about="A board of sliding tiles: each response moves tiles, and the environment answers "
    "with the new board. It is solved when the tiles read 1 2 3 ... and the blank "
    "comes last.",
    reward="1 for a solved board, several turns",
    example="`{board_key: board, progress_reward: 0.1}`",
    options=SlidingPuzzleOptions,
    base={"batch_size": Key("no conversation waits for another", 1), "max_turns": Key("", 8)},
    judge="nemo_like.environments.kinds.sliding_puzzle:sliding_puzzle",
    answers=True,
    record_check="nemo_like.environments.kinds.sliding_puzzle:has_board",
    is_harmless=True,
)


def sliding_puzzle(options: SlidingPuzzleOptions) -> PerTurnEnvironment:
    """Make the environment; configs/env/sliding_puzzle.yaml explains its options."""
    return PerTurnEnvironment(partial(_judge, options=options))


def _judge(turn: Turn, options: SlidingPuzzleOptions) -> Feedback:
    first = str(turn.data[options.board_key])
    board = slide(turn.state or first, turn.response)
    is_solved = board == solved(first)
    if not is_solved and not turn.is_last:
        return Feedback(observation=f"\n{board}\n", is_done=False, state=board)
    num_at_start = num_misplaced(first)
    progress = 1 - num_misplaced(board) / num_at_start if num_at_start else 1.0
    rewards = {"solved": options.solved_reward * is_solved}
    if options.progress_reward:
        rewards["progress"] = options.progress_reward * max(progress, 0.0)
    return Feedback(rewards, metrics={"solved": float(is_solved)})


def solved(board: str) -> str:
    """Return a board of the same shape and tiles with the tiles in order, row by row, and the blank last."""
    tiles = iter([*sorted(set(board) - {"\n", BLANK}), BLANK])
    return "".join(character if character == "\n" else next(tiles) for character in board)


def num_misplaced(board: str) -> int:
    """Count the tiles, without the blank, that are not at their final positions."""
    return sum(tile not in (place, BLANK) for tile, place in zip(board, solved(board), strict=True))


def slide(board: str, moves: str) -> str:
    """Return the board after all moves among the characters of ``moves``.

    Raises ValueError for a board that is not rectangular or has not exactly one blank.
    """
    rows = [list(row) for row in board.split("\n")]
    blanks = [(y, x) for y, row in enumerate(rows) for x, tile in enumerate(row) if tile == BLANK]
    if len(blanks) != 1 or len({len(row) for row in rows}) != 1:
        raise ValueError(f"board {board!r} must be rows of one length with one blank {BLANK!r}")
    ((y, x),) = blanks
    for move in moves:
        down, right = _TILE_FROM_BLANK.get(move, (0, 0))
        tile_y, tile_x = y + down, x + right
        if 0 <= tile_y < len(rows) and 0 <= tile_x < len(rows[0]):
            rows[y][x], rows[tile_y][tile_x] = rows[tile_y][tile_x], rows[y][x]
            y, x = tile_y, tile_x
    return "\n".join("".join(row) for row in rows)
