from __future__ import annotations

import matplotlib.image
import numpy as np

from nemo_like.observability.learning_curve import CurvePoints, write_learning_curve


def picture(path, points, title="demo"):
    write_learning_curve(path, points, title)
    return matplotlib.image.imread(path)[..., :3]


def test_the_picture_is_a_png_in_which_both_curves_are_drawn(tmp_path):
    both = CurvePoints(
        rewards=[(step, step / 40) for step in range(1, 31)], accuracies=[(0, 0.1), (15, 0.4), (30, 0.8)]
    )
    rewards_only = CurvePoints(rewards=both.rewards)
    path = tmp_path / "curve.png"
    first = picture(path, both)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert first.shape[0] >= 400
    assert first.shape[1] >= 800
    second = picture(tmp_path / "other.png", rewards_only)
    assert np.abs(first - second).max() > 0.5


def test_a_rising_curve_rises_from_left_to_right(tmp_path):
    image = picture(tmp_path / "curve.png", CurvePoints(accuracies=[(0, 0.1), (10, 0.9)]))
    # Red pixels are those of the accuracy curve; row 0 is at the top.
    is_red = (image[..., 0] > 0.7) & (image[..., 1] < 0.45)
    rows, columns = np.nonzero(is_red)
    width = image.shape[1]
    left, right = rows[columns < width * 0.3].mean(), rows[columns > width * 0.9].mean()
    assert right < left - 100


def test_a_run_of_one_step_can_be_drawn(tmp_path):
    assert (
        picture(tmp_path / "curve.png", CurvePoints(rewards=[(1, 0.5)], accuracies=[(0, 0.5)])).std() > 0.01
    )


def test_rewards_below_zero_are_within_the_picture(tmp_path):
    points = CurvePoints(accuracies=[(0, -1.0), (10, -0.5)])
    image = picture(tmp_path / "curve.png", points)
    is_red = (image[..., 0] > 0.7) & (image[..., 1] < 0.45)
    assert is_red.sum() > 100
