"""What one rank notices of its weights and its optimizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.batch.columns import PREV_LOGPROBS, REFERENCE_LOGPROBS
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.configuration import load_config
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.loss.update_watch import BackendState, UpdateWatch
from nemo_like.policy.workers.weight_samples import weight_sample
from nemo_like.policy.workers.worker_watch import WorkerWatch
from nemo_like.tripwires.advantage_digests import advantage_digests
from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.options import Tripwires
from nemo_like.tripwires.sample_checks import sample_digests
from tests.unit.algorithms.loss_cases import CONFIG

POLICY = load_config(Path(__file__).resolve().parents[3] / "configs/grpo_arithmetic_cpu.yaml").policy
CPU = torch.device("cpu")
ALONE = ParallelLayout(tp=1, cp=1, dp=1, pp=1).coordinates(0)
REFERENCE = [torch.ones(4, 3), torch.zeros(5)]
MASK = np.array([0, 1, 1, 0, 0, 1], np.uint8)
TAGS = {"num_prompt_tokens": (1, 2), "num_response_tokens": (2, 1)}
META = KVBatchMeta("train-1", (Chunk("c", (3, 3)),), ((0, 0), (0, 1)), frozenset(), TAGS)


def batch() -> PolicyBatch:
    columns = {"input_ids": np.arange(6, dtype=np.int32), "response_mask": MASK}
    return PolicyBatch(columns, [3, 3], {}, torch.device("cpu"))


def internals(**changes: Any) -> BackendState:
    """A rank before the first update."""
    start = BackendState(
        weights=REFERENCE,
        first_moments=[],
        num_updates=0,
        optimizer_steps=[],
        learning_rates=[0.0],
        weight_decays=[0.0],
    )
    return replace(start, **changes)


def watch_of(*references: list[torch.Tensor], level: Tripwires = Tripwires.all) -> WorkerWatch:
    """A watch that finds these weights of the reference, one after the other; the last ones for good."""
    found = [*(references or [REFERENCE])]

    def losses(sees_losses: bool) -> UpdateWatch:
        return UpdateWatch(CONFIG, sees_losses=sees_losses)

    return WorkerWatch(POLICY, losses, ALONE, lambda: found.pop(0) if len(found) > 1 else found[0], level)


def measured(before: BackendState, after: BackendState, watch: WorkerWatch | None = None) -> dict[str, float]:
    """What one training phase gives that began with ``before``."""
    watch = watch or watch_of()
    watch.training(META, batch())
    watch.begin(before)
    watch.end(after)
    return {name: metric.value for name, metric in watch.trained()[0].items()}


TRAINED = internals(
    weights=[torch.full((4, 3), 1.01), torch.full((5,), -0.02)],
    first_moments=[torch.tensor([0.3, 0.4])],
    num_updates=2,
    optimizer_steps=[2, 2],
    learning_rates=[0.01, 0.004],
    weight_decays=[0.0, 0.1],
)


def test_a_training_phase_moves_weights_and_counts() -> None:
    found = measured(internals(), TRAINED)
    assert found[Measured.weights_moved] == pytest.approx(0.02)
    assert found[Measured.largest_weight] == pytest.approx(1.01)
    assert found[Measured.num_updates] == 2
    assert found[Measured.learning_rate] == 0.01
    assert found[Measured.learning_rate_spread] == pytest.approx(0.006)
    assert found[Measured.weight_decay] == 0.1
    assert found[Measured.optimizer_step_gap] == found[Measured.num_wrong_samples] == 0
    assert found[Measured.reference_moved] == found[Measured.weights_moved_elsewhere] == 0


def test_an_optimizer_that_began_anew_counts_less() -> None:
    assert measured(internals(), replace(TRAINED, optimizer_steps=[2, 1]))[Measured.optimizer_step_gap] == 1


def test_a_moment_longer_than_clipped_gradients_make_it_is_measured() -> None:
    # b1 = 0.9: after two updates at most (1 - 0.81) x 1 where there was none, and 0.81 of what there was.
    long = replace(TRAINED, first_moments=[torch.tensor([0.3, 0.4])])
    assert measured(internals(), long)[Measured.moment_excess] == pytest.approx(0.5 - 0.19)
    before = internals(first_moments=[torch.tensor([0.0, 0.4])])
    assert measured(before, long)[Measured.moment_excess] == 0.0


def test_muons_momentum_has_a_decay_of_its_own() -> None:
    # 0.95: after two updates at most (1 - 0.9025) x 1.
    long = replace(TRAINED, first_moments=[], momenta=[torch.tensor([0.3, 0.4])])
    assert measured(internals(), long)[Measured.moment_excess] == pytest.approx(0.5 - 0.0975)
    before = internals(momenta=[torch.tensor([0.0, 0.5])])
    assert measured(before, long)[Measured.moment_excess] == 0.0


def test_weights_that_change_between_two_phases_are_noticed() -> None:
    watch = watch_of()
    measured(internals(), TRAINED, watch)
    assert measured(TRAINED, TRAINED, watch)[Measured.weights_moved_elsewhere] == 0
    assert measured(internals(), TRAINED, watch)[Measured.weights_moved_elsewhere] == 1


def test_weights_from_a_checkpoint_are_no_such_change() -> None:
    watch = watch_of()
    measured(internals(), TRAINED, watch)
    watch.forget_weights()
    assert measured(internals(), TRAINED, watch)[Measured.weights_moved_elsewhere] == 0


def test_a_reference_with_other_weights_than_at_the_start_is_noticed() -> None:
    assert measured(internals(), TRAINED)[Measured.reference_moved] == 0
    watch = watch_of(REFERENCE, [torch.ones(4, 3), torch.ones(5)])
    assert measured(internals(), TRAINED, watch)[Measured.reference_moved] == 1


@pytest.mark.parametrize(("is_new", "has_moved"), [(False, 1), (True, 0)])
def test_a_checkpoint_may_change_the_reference_only_where_it_has_one(is_new: bool, has_moved: float) -> None:
    watch = watch_of(REFERENCE, [REFERENCE[0] + 1])
    watch.reference_has_come(is_new=is_new)
    assert measured(internals(), TRAINED, watch)[Measured.reference_moved] == has_moved


def test_a_checkpoint_without_a_reference_brings_the_first_one_back() -> None:
    watch = watch_of(REFERENCE, [REFERENCE[0] + 1], REFERENCE)
    watch.renew_reference()
    watch.reference_has_come(is_new=False)
    assert measured(internals(), TRAINED, watch)[Measured.reference_moved] == 0


@pytest.mark.parametrize(
    ("after", "reference_logprob", "is_wrong"),
    [
        (internals(), -1.0, 0.0),  # training changed nothing, so both are the same
        (TRAINED, -1.5, 0.0),
        (TRAINED, -1.0, 1.0),
    ],
)
def test_another_reference_gives_other_logprobs(
    after: BackendState, reference_logprob: float, is_wrong: float
) -> None:
    watch = watch_of()
    measured(internals(), after, watch)
    reference = torch.full((6,), reference_logprob)
    watch.scored({PREV_LOGPROBS: torch.full((6,), -1.0), REFERENCE_LOGPROBS: reference}, batch())
    assert measured(after, after, watch)[Measured.has_policy_as_reference] == is_wrong


def scored(watch: WorkerWatch) -> None:
    """Both score the batch, half a nat apart."""
    reference = torch.full((6,), -1.5)
    watch.scored({PREV_LOGPROBS: torch.full((6,), -1.0), REFERENCE_LOGPROBS: reference}, batch())


def test_before_the_first_update_the_reference_gives_the_policys_logprobs() -> None:
    watch = watch_of()
    scored(watch)
    assert measured(internals(), TRAINED, watch)[Measured.reference_gap] == 0.5
    scored(watch)
    assert measured(TRAINED, TRAINED, watch)[Measured.reference_gap] == 0.0


def test_after_a_checkpoint_was_loaded_the_reference_may_differ() -> None:
    watch = watch_of()
    watch.forget_weights()
    scored(watch)
    assert measured(internals(), TRAINED, watch)[Measured.reference_gap] == 0.0


def test_samples_that_do_not_fit_their_tags_are_counted() -> None:
    watch = watch_of()
    watch.training(META.with_tags({"num_response_tokens": [1, 2]}), batch())
    assert watch.trained()[0][Measured.num_wrong_samples].value == 2


def test_a_sample_of_weights_is_spread_over_every_tensor() -> None:
    large = torch.arange(3 * 4096, dtype=torch.bfloat16)
    found = weight_sample([large, torch.tensor([7.0]), torch.empty(0)])
    assert len(found) == 4096 + 1
    assert found[-1] == 7.0
    assert found[:3].tolist() == [0.0, 3.0, 6.0]
    assert len(weight_sample([])) == 0


def test_cheap_tripwires_see_the_losses_of_some_phases() -> None:
    watch = watch_of(level=Tripwires.cheap)
    seen = [Measured.num_trained_tokens in measured(internals(), TRAINED, watch) for _ in range(11)]
    assert seen == [True] * 3 + [False] * 6 + [True, False]


def test_parts_that_are_accumulated_belong_to_the_phase_that_trains_on_them() -> None:
    watch = watch_of(level=Tripwires.cheap)
    watch.training(META.with_tags({"num_response_tokens": [1, 2]}), batch())
    losses = watch.losses
    watch.training(META, batch())
    assert watch.losses is losses
    nothing = PolicyBatch({"input_ids": np.zeros(0, np.int32), "response_mask": MASK[:0]}, [], {}, CPU)
    watch.training(META.subset([]), nothing)
    assert watch.losses is losses
    watch.begin(internals())
    watch.end(TRAINED)
    assert watch.trained()[0][Measured.num_wrong_samples].value == 2
    watch.training(META, batch())
    assert watch.losses is not losses


def test_an_abandoned_phase_leaves_nothing_and_does_not_count() -> None:
    watch = watch_of(level=Tripwires.cheap)
    for _ in range(2):
        measured(internals(), TRAINED, watch)
    for _ in range(5):
        watch.training(META.with_tags({"num_response_tokens": [1, 2]}), batch())
        given_up = watch.losses
        watch.abandon()
    found = measured(internals(), TRAINED, watch)
    assert given_up.sees_losses
    assert Measured.num_trained_tokens in found  # it is the third phase
    assert found[Measured.num_wrong_samples] == 0
    assert Measured.num_trained_tokens not in measured(internals(), TRAINED, watch)


def found_after(watch: WorkerWatch) -> tuple[dict[str, float], tuple[str, ...]]:
    """What the present phase of a watch measured, and the tensors that it names."""
    watch.begin(internals())
    watch.end(TRAINED)
    found, named = watch.trained()
    return {name: metric.value for name, metric in found.items()}, named


def test_gradients_that_are_held_when_the_loss_is_first_called_are_measured() -> None:
    watch, held = watch_of(), [torch.tensor([3.0, 4.0])]
    watch.training(META, batch())
    loss = watch.seeing_gradients(lambda outputs, inputs: outputs, lambda: held)
    assert loss(torch.tensor(1.0), None) == 1.0
    held[0] = torch.tensor([30.0, 40.0])  # of the first backward pass
    loss(torch.tensor(1.0), None)
    assert found_after(watch)[0][Measured.held_gradient] == 5.0


@pytest.mark.parametrize(("passed_on", "expected"), [(1.0, 2.0), (0.0, 0.0)])
def test_the_gradient_of_the_first_layers_output_is_measured(passed_on: float, expected: float) -> None:
    watch, layer = watch_of(), torch.nn.Linear(1, 1, bias=False)
    watch.training(META, batch())
    with watch.seeing_first_layer(layer):
        output = layer(torch.ones(1, 1))
        (2.0 * (output.detach() * (1 - passed_on) + output * passed_on)).sum().backward()
    with watch.seeing_first_layer(None):
        pass
    found, _ = found_after(watch)
    assert found[Measured.num_first_layers] == 1.0
    assert found[Measured.first_layer_gradient] == expected


def test_only_the_first_update_of_a_phase_is_compared_with_its_formula() -> None:
    watch, asked = watch_of(), []
    watch.training(META, batch())
    for number in range(2):
        with watch.updating(lambda number=number: asked.append(number) or []):
            pass
    assert asked == [0, 0]


def test_an_advantage_that_is_not_the_drivers_is_counted() -> None:
    watch, samples = watch_of(), batch()
    samples.set_sample_values({"advantage": [0.5, -0.5]})
    digests = sample_digests(samples.columns["input_ids"].numpy(), [3, 3])
    tags = {**META.tags, "advantage_digest": advantage_digests(digests, [0.5, -0.25])}
    watch.training(META.with_tags(tags), samples)
    assert found_after(watch)[0][Measured.num_wrong_advantages] == 1


def test_restored_state_is_compared_by_name() -> None:
    watch = watch_of()
    watch.compare_saved(
        {"a": 1, "b": 2, "moment exp_avg of a": 3}, {"a": 1, "b": 3, "moment exp_avg of a": 4}
    )
    watch.training(META, batch())
    found, named = found_after(watch)
    assert found[Measured.num_unlike_saved] == found[Measured.num_unlike_moments] == 1
    assert named == ("b (restored)", "moment exp_avg of a (restored)")
    watch.training(META, batch())
    assert found_after(watch)[1] == ()
