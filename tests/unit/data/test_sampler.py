from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.data.sampler import MixtureSampler, PromptSampler, steps_within_epochs


def test_without_shuffling_prompts_come_in_order_and_start_over():
    sampler = PromptSampler(3, seed=0, shuffle=False)
    assert sampler.next(2) == (0, 1)
    assert sampler.next(2) == (2, 0)
    assert sampler.epoch == 1


def test_each_epoch_holds_every_prompt_once_in_an_order_of_its_own():
    sampler = PromptSampler(50, seed=3, shuffle=True)
    first, second = sampler.next(50), sampler.next(50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != tuple(range(50))


def test_the_order_follows_from_the_seed_alone():
    assert PromptSampler(50, seed=3, shuffle=True).next(80) == PromptSampler(50, seed=3, shuffle=True).next(
        80
    )
    assert PromptSampler(50, seed=3, shuffle=True).next(50) != PromptSampler(50, seed=4, shuffle=True).next(
        50
    )


def test_a_request_may_be_larger_than_the_dataset():
    assert PromptSampler(2, seed=0, shuffle=False).next(5) == (0, 1, 0, 1, 0)


@given(
    num_prompts=st.integers(1, 20),
    seed=st.integers(),
    before=st.integers(0, 60),
    after=st.integers(1, 60),
    shuffle=st.booleans(),
)
def test_a_restored_sampler_continues_with_the_very_next_prompt(num_prompts, seed, before, after, shuffle):
    sampler = PromptSampler(num_prompts, seed, shuffle)
    if before:
        sampler.next(before)
    restored = PromptSampler(num_prompts, seed, shuffle)
    restored.load_state_dict(sampler.state_dict())
    assert restored.next(after) == sampler.next(after)


@given(st.integers(1, 20), st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_how_the_requests_are_cut_does_not_matter(num_prompts, counts):
    in_parts = PromptSampler(num_prompts, seed=1, shuffle=True)
    parts = [index for count in counts for index in in_parts.next(count)]
    assert tuple(parts) == PromptSampler(num_prompts, seed=1, shuffle=True).next(sum(counts))


@pytest.mark.parametrize(("key", "value"), [("seed", 2), ("num_prompts", 11), ("shuffle", False)])
def test_a_state_of_another_order_is_refused_with_both_values(key, value):
    state = PromptSampler(10, seed=1, shuffle=True).state_dict()
    with pytest.raises(ValueError, match=f"{key}={value}"):
        PromptSampler(10, seed=1, shuffle=True).load_state_dict({**state, key: value})


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="num_prompts=0 must be at least 1"):
        PromptSampler(0, seed=1, shuffle=True)


def test_a_request_for_nothing_is_refused():
    with pytest.raises(ValueError, match="count=0"):
        PromptSampler(3, seed=1, shuffle=True).next(0)


def test_one_source_alone_is_in_the_order_of_its_own_sampler():
    mixture, alone = MixtureSampler([10], [2.0], seed=3, shuffle=True), PromptSampler(10, 3, True)
    assert mixture.next(25) == alone.next(25)


def test_sources_come_in_the_proportion_of_their_weights():
    # Source 0 has the indices 0 to 9, source 1 10 to 14; 3 to 1.
    order = MixtureSampler([10, 5], [3.0, 1.0], seed=0, shuffle=False).next(12)
    assert order == (0, 1, 10, 2, 3, 4, 11, 5, 6, 7, 12, 8)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(1, 200))
def test_no_source_is_ever_a_whole_prompt_further_from_its_share_than_there_are_sources(weights, count):
    sizes = [1000] * len(weights)
    taken = MixtureSampler(sizes, weights, seed=0, shuffle=False).next(count)
    for source, weight in enumerate(weights):
        share = count * weight / sum(weights)
        assert abs(sum(index // 1000 == source for index in taken) - share) <= len(weights)


def test_a_small_source_repeats_while_a_large_one_goes_on():
    order = MixtureSampler([100, 2], [1.0, 1.0], seed=0, shuffle=False).next(8)
    assert order == (0, 100, 1, 101, 2, 100, 3, 101)


def test_sources_of_equal_size_have_orders_of_their_own():
    mixture = MixtureSampler([50, 50, 50], [1.0, 1.0, 1.0], seed=3, shuffle=True)
    taken = mixture.next(300)  # two epochs of each
    orders = [[index - 50 * n for index in taken if index // 50 == n] for n in range(3)]
    for order in orders:
        assert sorted(order[:50]) == sorted(order[50:]) == list(range(50))
    places = [[order.index(prompt) for prompt in range(50)] for order in orders]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        same = sum(a == b for a, b in zip(places[one], places[other], strict=True))
        assert same < 8  # of independent orders 1 in the mean
    assert tuple(orders[0]) == PromptSampler(50, seed=3, shuffle=True).next(100)


def test_a_mixture_saved_when_its_sources_shared_an_order_goes_on_in_that_order():
    shared = PromptSampler(50, seed=3, shuffle=True).next(120)
    states = [PromptSampler(50, seed=3, shuffle=True) for _ in range(2)]
    for state in states:
        state.next(10)
    saved = {"weights": [1.0, 1.0], "sources": [state.state_dict() for state in states]}
    mixture = MixtureSampler([50, 50], [1.0, 1.0], seed=3, shuffle=True)
    mixture.load_state_dict(json.loads(json.dumps(saved)))
    assert mixture.state_dict() == saved
    expected = [index for prompt in shared[10:] for index in (prompt, 50 + prompt)]
    assert list(mixture.next(220)) == expected


@pytest.mark.parametrize("taken", [0, 1, 7, 40])
def test_a_mixture_continues_with_the_very_next_prompt(taken):
    def mixture():
        return MixtureSampler([7, 5, 11], [3.0, 1.0, 2.0], seed=4, shuffle=True)

    whole, first, second = mixture(), mixture(), mixture()
    if taken:
        first.next(taken)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.next(30) == whole.next(taken + 30)[taken:]


@pytest.mark.parametrize(
    "other",
    [
        MixtureSampler([7], [1.0], 0, True),
        MixtureSampler([7, 5], [1.0, 2.0], 0, True),
        MixtureSampler([7, 6], [1.0, 1.0], 0, True),
        MixtureSampler([7, 5], [1.0, 1.0], 1, True),
    ],
)
def test_the_state_of_another_mixture_is_refused(other):
    with pytest.raises(ValueError, match="the data"):
        MixtureSampler([7, 5], [1.0, 1.0], 0, True).load_state_dict(other.state_dict())


@pytest.mark.parametrize(("sizes", "weights"), [([], []), ([3], [1.0, 1.0]), ([3, 3], [1.0, 0.0])])
def test_every_source_needs_one_weight_above_zero(sizes, weights):
    with pytest.raises(ValueError, match="each needs one above 0"):
        MixtureSampler(sizes, weights, 0, True)


@pytest.mark.parametrize(
    ("num_epochs", "sizes", "weights", "steps"),
    [
        (1, [40], [1.0], 2),  # the third step of 16 would begin a second pass
        (2, [40], [1.0], 5),  # 80 prompts: the third step has prompts of both passes
        (0.5, [40], [1.0], 1),
        (0.3, [160], [0.1], 3),  # 48 prompts, whatever floats make of 0.3
        (1, [10], [1.0], 0),
        (1, [30, 10], [3.0, 1.0], 2),  # shares as the sizes are: 40 prompts
        (1, [30, 30], [3.0, 1.0], 7),  # the second is passed after 4 x 30 prompts
    ],
)
def test_steps_within_epochs_are_those_of_the_source_that_is_passed_last(num_epochs, sizes, weights, steps):
    assert steps_within_epochs(num_epochs, sizes, weights, 16) == steps


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=2),
    prompts=st.integers(1, 5),
    num_epochs=st.integers(1, 3),
)
def test_a_run_of_that_many_steps_has_passed_no_source_of_equal_share_oftener(sizes, prompts, num_epochs):
    steps = steps_within_epochs(num_epochs, sizes, [1.0] * len(sizes), prompts)
    sampler = MixtureSampler(sizes, [1.0] * len(sizes), seed=0, shuffle=False)
    for _ in range(steps):
        sampler.next(prompts)
    assert sampler.epoch <= num_epochs
    sampler.next(prompts)
    assert steps_within_epochs(num_epochs, sizes, [1.0] * len(sizes), 1) < (steps + 1) * prompts
