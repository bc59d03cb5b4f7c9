from __future__ import annotations

import math

import pytest

from nemo_like.algorithms.masking import mask_logprob_mismatch, mask_truncated


def test_samples_above_the_threshold_are_masked_and_counted():
    result = mask_logprob_mismatch([1.0, 1.0, 1.0], [1.0, 1.5, 1.2], threshold=1.2)
    assert result.sample_mask == (1.0, 0.0, 1.0)
    assert result.num_masked == 1


def test_a_sample_that_was_masked_before_is_not_counted_again():
    result = mask_logprob_mismatch([0.0, 1.0], [9.0, 1.0], threshold=2.0)
    assert result.sample_mask == (0.0, 1.0)
    assert result.num_masked == 0


def test_an_error_that_is_not_a_number_masks_its_sample():
    result = mask_logprob_mismatch([1.0, 1.0], [math.nan, math.inf], threshold=2.0)
    assert result.sample_mask == (0.0, 0.0)
    assert result.num_masked == 2


def test_no_threshold_masks_nothing():
    result = mask_logprob_mismatch([1.0, 0.0], [math.inf, 1.0], threshold=None)
    assert result.sample_mask == (1.0, 0.0)
    assert result.num_masked == 0


def test_unequal_lengths_are_an_error():
    with pytest.raises(ValueError, match="1 sample mask entries but 2 log-prob errors"):
        mask_logprob_mismatch([1.0], [1.0, 1.0], threshold=1.0)


def test_the_overlong_filter_masks_truncated_samples_and_counts_those_that_trained():
    masked = mask_truncated([1.0, 1.0, 0.0], [False, True, True])
    assert masked.sample_mask == (1.0, 0.0, 0.0)
    assert masked.num_masked == 1
