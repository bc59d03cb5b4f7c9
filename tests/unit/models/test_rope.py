"""What is read of rotary positions where layers with and without a window rotate in ways of their own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nemo_like.models.latent_sizes import LatentSizes
from nemo_like.models.rope import Rope, latent_rope, query_scale, two_ropes, yarn

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
AMPLITUDE = 0.1 * math.log(8.0) + 1.0


def test_each_kind_of_layer_has_settings_of_its_own() -> None:
    content = {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {**YARN, "rope_theta": 700.0, "beta_fast": 16.0, "attention_factor": 1.5},
        }
    }
    assert two_ropes(content) == (
        Rope(theta=300.0),
        Rope(theta=700.0, factor=8.0, trained_length=8192, beta_fast=16.0, beta_slow=1.0, amplitude=1.5),
    )


def test_earlier_settings_are_those_of_layers_without_a_window() -> None:
    content = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": YARN}
    assert two_ropes(content) == (
        Rope(theta=1e4),
        Rope(theta=1e6, factor=8.0, trained_length=8192, amplitude=AMPLITUDE),
    )
    linear = {"rope_type": "linear", "factor": 8.0}
    assert two_ropes({"rope_theta": 1e6, "rope_scaling": linear}) == (
        Rope(theta=1e4),
        Rope(theta=1e6, factor=8.0),
    )


def test_settings_for_all_layers_under_the_new_key_are_not_read_as_transformers_does_not() -> None:
    content = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rope_theta": 1e6}
    assert two_ropes(content) == (Rope(theta=1e4), Rope(theta=1e6))


@pytest.mark.parametrize(
    "scaling",
    [
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        {**YARN, "factor": None},
        {"rope_type": "yarn", "factor": 8.0},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "longrope"},
    ],
)
def test_another_kind_of_scaling_is_none(scaling: dict[str, Any]) -> None:
    assert two_ropes({"rope_scaling": scaling}) is None


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_all_layers_may_rotate_with_yarn_between_pairs_that_are_no_whole_numbers(key: str) -> None:
    one = Rope(theta=1.5e5, factor=8.0, trained_length=8192, rounds=False, amplitude=AMPLITUDE)
    assert yarn({"rope_theta": 1.5e5, key: {**YARN, "truncate": False}}) == (one,)


@pytest.mark.parametrize("settings", [{}, {"rope_type": "linear", "factor": 8.0}, {**YARN, "mscale": 1.0}])
def test_without_yarn_there_is_no_rotation_of_all_layers(settings: dict[str, Any]) -> None:
    assert yarn({"rope_scaling": settings}) is None


def latent(head: int) -> LatentSizes:
    """Half of a head of this size rotates."""
    half = head // 2
    return LatentSizes(query_latent=None, key_value_latent=8, plain=half, rotated=half, value=8)


def test_latent_attention_rotates_as_yarn_does_and_scales_by_both_mscales() -> None:
    """0.1 ln(40) + 1 = 1.36889; of queries with keys, twice, where mscale_all_dim is 1."""
    settings = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    both = {"rope_theta": 5e4, "rope_scaling": {**settings, "mscale": 1.0, "mscale_all_dim": 1.0}}
    assert latent_rope(both) == (Rope(theta=5e4, factor=40.0, trained_length=4096, amplitude=1.0),)
    assert query_scale(both, "", latent(64)) == pytest.approx(1.36889**2 / 8, rel=1e-5)
    without = {"rope_scaling": settings}
    (rotation,) = latent_rope(without) or ()
    assert rotation == Rope(
        theta=1e4, factor=40.0, trained_length=4096, amplitude=pytest.approx(1.36889, rel=1e-5)
    )
    assert query_scale(without, "", latent(64)) == 1 / 8
    half = {"rope_scaling": {**settings, "mscale": 0.5, "mscale_all_dim": 1.0}}
    (rotation,) = latent_rope(half) or ()
    assert rotation.amplitude == pytest.approx((1 + 0.368888 / 2) / 1.368888, rel=1e-5)


def test_latent_attention_may_rotate_without_scaling() -> None:
    content = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
    assert latent_rope(content) == (Rope(theta=700.0),)
    assert query_scale(content, "", latent(16)) == 1 / 4


@pytest.mark.parametrize(
    "scaling",
    [
        {**YARN, "mscale": 1.0},
        {**YARN, "mscale_all_dim": 1.0},
        {**YARN, "attention_factor": 1.0},
        {**YARN, "truncate": False},
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "llama3", "factor": 8.0},
    ],
)
def test_what_vllm_or_megatron_core_would_rotate_otherwise_is_none(scaling: dict[str, Any]) -> None:
    assert latent_rope({"rope_scaling": scaling}) is None
