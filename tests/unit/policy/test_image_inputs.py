"""The images of a micro-batch, and where its tokens are among them; worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_like.batch.columns import (
    IMAGE_GRIDS,
    OBSERVED_IMAGE_GRIDS,
    OBSERVED_PIXEL_VALUES,
    PIXEL_VALUES,
)
from nemo_like.batch.meta import MicroBatch, MicroBatchLayout, Schedule
from nemo_like.policy.batch.image_inputs import BatchImages
from nemo_like.policy.batch.policy_batch import PolicyBatch

IMAGE = 9


def pixels(*values: int) -> list[np.ndarray]:
    """Images of one patch of one value each."""
    return [np.full((1, 1), value, np.float32) for value in values]


def grids(*heights: int) -> list[np.ndarray]:
    return [np.array([1, height, 2]) for height in heights]


def images_of(
    prompt_index: list[int], prompts: list[list[int]], observed: list[list[int]] | None = None
) -> BatchImages:
    """Images of as many patches in height as their number says, which is also the value of their pixels."""
    observed = [[] for _ in prompt_index] if observed is None else observed
    return BatchImages(
        prompt_index,
        {
            PIXEL_VALUES: [pixels(*one) for one in prompts],
            IMAGE_GRIDS: [grids(*one) for one in prompts],
            OBSERVED_PIXEL_VALUES: [pixels(*one) for one in observed],
            OBSERVED_IMAGE_GRIDS: [grids(*one) for one in observed],
        },
    )


def test_the_tower_sees_each_image_once_and_the_rows_have_them_in_their_order() -> None:
    of_batch = images_of([2, 0, 1, 2], [[1], [], [2, 3]])
    images = of_batch.of_rows([0, 1, 2, 3], ())
    assert images is not None
    assert images.pixel_values.flatten().tolist() == [2, 3, 1]
    assert images.grids.tolist() == [[1, 2, 2], [1, 3, 2], [1, 1, 2]]
    assert images.order == (0, 1, 2, 0, 1)
    assert of_batch.of_rows([2, 2], ()) is None


def test_images_of_observations_follow_those_of_the_prompt_in_each_sample() -> None:
    of_batch = images_of([0, 0, 1], [[1], [2]], [[5], [], [6, 5]])
    images = of_batch.of_rows([0, 1, 2], ())
    assert images is not None
    assert images.pixel_values.flatten().tolist() == [1, 5, 2, 6, 5]
    assert images.order == (0, 1, 0, 2, 3, 4)
    shared = of_batch.of_rows([0, 1, 2], (0, 4, 0))
    assert shared is not None
    assert [shared.pixel_values.flatten().tolist()[number] for number in shared.order] == [1, 5, 2, 6, 5]


def rope_index(input_ids: Tensor, image_grids: Tensor) -> tuple[Tensor, Tensor]:
    """An image's tokens are all at the place where it begins, in time, and one place further in height and
    two in width; the text after it goes on one place further."""
    (row,) = input_ids.tolist()
    places, at = [], 0
    for number, token in enumerate(row):
        at += number > 0 and not (token == IMAGE and row[number - 1] == IMAGE)
        places.append([at, at + (token == IMAGE), at + 2 * (token == IMAGE)])
    return torch.tensor(places).T[:, None], torch.tensor([[at + 1 - len(row)]])


IDS = [5, IMAGE, IMAGE, IMAGE, 6, 7, *(5, IMAGE, IMAGE, IMAGE, 6, 8, 8, 8), *(4, 4, 4)]
LENGTHS = [6, 8, 3]
PLACES = [[0, 0, 0], [1, 2, 3], [1, 2, 3], [1, 2, 3], [2, 2, 2]]


def test_samples_of_a_group_go_on_from_where_their_images_end() -> None:
    of_batch = images_of([0, 0, 1], [[4], []])
    positions = of_batch.rope_positions(torch.tensor(IDS), torch.tensor(LENGTHS), rope_index)
    text = [[[value] * 3 for value in range(*span)] for span in ((3, 4), (3, 6), (0, 3))]
    assert positions.tolist() == [*PLACES, *text[0], *PLACES, *text[1], *text[2]]


def test_a_sample_with_images_of_its_own_is_placed_by_itself() -> None:
    ids = [*IDS[:6], *(5, IMAGE, IMAGE, IMAGE, 6, IMAGE, IMAGE, IMAGE), *IDS[:6]]
    of_batch = images_of([0, 0, 0], [[4]], [[], [4], []])
    positions = of_batch.rope_positions(torch.tensor(ids), torch.tensor([6, 8, 6]), rope_index)
    assert positions.tolist() == [*PLACES, [3] * 3, *PLACES, *[[3, 4, 5]] * 3, *PLACES, [3] * 3]


def batch() -> PolicyBatch:
    mask = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1]
    columns: dict[str, Any] = {"input_ids": np.array(IDS), "response_mask": np.array(mask)}
    built = PolicyBatch(columns, LENGTHS, {}, torch.device("cpu"), (0, 0, 1))
    built.add(
        {
            PIXEL_VALUES: [pixels(1), []],
            IMAGE_GRIDS: [grids(4), []],
            OBSERVED_PIXEL_VALUES: [[], [], []],
            OBSERVED_IMAGE_GRIDS: [[], [], []],
        }
    )
    built.place_images(rope_index)
    return built


def inputs(layout: MicroBatchLayout, spec: MicroBatch) -> Any:
    return batch().micro_batch(spec, Schedule((), layout))


def test_every_layout_places_its_tokens_and_images() -> None:
    padded = inputs(MicroBatchLayout.padded, MicroBatch((1, 2), 7))
    first, second = padded.position_ids.movedim(0, -1).tolist()
    assert first == [*PLACES, [3] * 3, [4] * 3]
    assert second[:2] == [[0] * 3, [1] * 3]
    assert padded.images.order == (0,)

    packed = inputs(MicroBatchLayout.packed, MicroBatch((2, 0, 1), 16))
    (row,) = packed.position_ids.movedim(0, -1).tolist()
    assert row[:14] == [[0] * 3, [1] * 3, *PLACES, *PLACES, [3] * 3, [4] * 3]
    assert packed.images.order == (0, 0)
    assert packed.images.pixel_values.tolist() == [[1]]

    shared = inputs(MicroBatchLayout.packed, MicroBatch((0, 1), 9, (0, 5)))
    (row,) = shared.position_ids.movedim(0, -1).tolist()
    assert row[:7] == [*PLACES, [3] * 3, [4] * 3]
    assert shared.images.order == (0,)


def test_a_batch_without_columns_of_images_has_one_position_for_each_token() -> None:
    columns: dict[str, Any] = {"input_ids": np.array([4, 4, 4]), "response_mask": np.array([0, 0, 1])}
    plain = PolicyBatch(columns, [3], {}, torch.device("cpu"))
    plain.place_images(rope_index)
    of_text = plain.micro_batch(MicroBatch((0,), 2), Schedule(()))
    assert (of_text.position_ids.tolist(), of_text.images) == ([[0, 1]], None)
