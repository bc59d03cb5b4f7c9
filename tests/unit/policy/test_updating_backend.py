"""What backends share of training: an update in parts, normalised at the end, is the update of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.critic import TokenValues
from nemo_like.algorithms.logprobs import TokenScores
from nemo_like.algorithms.options import KLType, LossConfig
from nemo_like.batch.columns import INPUT_IDS, RESPONSE_MASK
from nemo_like.batch.meta import GlobalBatch, MicroBatch, Schedule
from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.configuration import load_config
from nemo_like.policy.backends.learning_rate import learning_rate
from nemo_like.policy.backends.loss_scaling import LossScaler
from nemo_like.policy.backends.updating_backend import UpdatingBackend, check_accumulated
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.loss.objective import LossFunction, Objective, PolicyObjective
from nemo_like.policy.loss.update_watch import BackendState, UpdateWatch
from nemo_like.policy.loss.updated_tensors import UpdatedTensor
from nemo_like.policy.loss.value_objective import ValueObjective
from nemo_like.tripwires.measured import Measured
from tests.unit.algorithms.loss_cases import CONFIG, GSPO, of_kind

CPU = torch.device("cpu")
ALONE = ParallelLayout(tp=1, cp=1, dp=1, pp=1).coordinates(0)
CRITIC = load_config(Path(__file__).resolve().parents[3] / "configs/ppo_arithmetic_cpu.yaml").value
assert CRITIC is not None
LENGTHS = (3, 2, 5, 4, 2, 6)  # of which one is the prompt
MASK = (1.0, 0.0, 1.0, 1.0, 1.0, 1.0)
WHOLE = GlobalBatch(
    num_samples=5,
    num_tokens=2 + 4 + 3 + 1 + 5,
    micro_batches=(MicroBatch((0, 1, 2), 5), MicroBatch((3, 4, 5), 6)),
)
NONE = replace(WHOLE, micro_batches=())
FULL = replace(
    CONFIG, reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True, entropy_coef=0.01
)
LOSSES = {
    "mean over tokens": FULL,
    "mean over samples": replace(FULL, token_level_loss=False, reference_policy_kl_type=KLType.k2),
    "constant normaliser": replace(CONFIG, token_level_loss=False, sequence_length_normalizer=9),
    "GSPO": GSPO,
    "on policy": replace(CONFIG, force_on_policy_ratio=True),
    "SAPO": of_kind("sapo"),
}


def columns() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    total = sum(LENGTHS)
    names = ("prev_logprobs", "generation_logprobs", "reference_logprobs", "values", "returns")
    found = {name: (-1 - 0.2 * rng.random(total)).astype(np.float32) for name in names}
    mask = np.concatenate([np.r_[0, np.ones(length - 1)] for length in LENGTHS]).astype(np.uint8)
    return {**found, INPUT_IDS.name: np.arange(total, dtype=np.int32), RESPONSE_MASK.name: mask}


def batch_of(samples: Sequence[int]) -> PolicyBatch:
    """These of the six samples, in this order."""
    parts = {name: np.split(values, np.cumsum(LENGTHS)[:-1]) for name, values in columns().items()}
    return PolicyBatch(
        {name: np.concatenate([of_sample[one] for one in samples]) for name, of_sample in parts.items()},
        [LENGTHS[one] for one in samples],
        {
            "advantage": [0.5 * one - 1 for one in samples],
            "sample_mask": [MASK[one] for one in samples],
        },
        CPU,
    )


class ByHand(UpdatingBackend):
    """A model of one rank that gives every token the same, and keeps the gradients by the token's id."""

    def __init__(self, objective: Objective) -> None:
        self.cfg = self._training = CRITIC
        self.objective, self.coordinates, self.device = objective, ALONE, CPU
        self.gradients = torch.zeros(sum(LENGTHS))
        self.rates: list[float] = []

    def _load_weights(self, path: Path) -> object:
        raise NotImplementedError

    def _token_outputs(self, *_: Any, **__: Any) -> list[torch.Tensor]:
        return []

    def _gradients_in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    _optimizer_in_use = _gradients_in_use

    def _compute_gradients(
        self, batch: PolicyBatch, schedule: Schedule, specs: Sequence[MicroBatch], loss: LossFunction
    ) -> None:
        for spec in specs:
            inputs = batch.micro_batch(spec, schedule)
            outputs = (-1 - 0.01 * (inputs.token_ids % 7)).requires_grad_()
            entropy = (0.5 + 0.01 * inputs.token_ids).requires_grad_()
            if isinstance(self.objective, ValueObjective):
                loss(TokenValues(outputs), inputs).backward()
            else:
                loss(TokenScores(logprobs=outputs, entropy=entropy), inputs).backward()
            assert outputs.grad is not None
            self.gradients[inputs.token_ids] += outputs.grad

    _accumulate_gradients = _compute_gradients

    def _normalise_gradients(self, share: float) -> None:
        self.gradients *= share

    def _gradients(self) -> list[torch.Tensor]:
        return [self.gradients]

    def _clear_gradients(self) -> None:
        self.gradients.zero_()

    def _step(self, rate: float) -> float:
        self.rates.append(rate)
        return float(self.gradients.norm())

    def _backend_state(self) -> BackendState:
        return BackendState(
            weights=[],
            first_moments=[],
            num_updates=self.num_updates,
            optimizer_steps=[len(self.rates)],
            learning_rates=self.rates[-1:] or [0.0],
            weight_decays=[0.0],
        )

    def _updated_tensors(self) -> Sequence[UpdatedTensor]:
        return []

    def _first_layer(self) -> torch.nn.Module | None:
        return None

    def _named_parameters(self) -> Sequence[tuple[str, torch.Tensor]]:
        return [("gradients", self.gradients)]


class Watch:
    """Watches one phase, and keeps what the backend shows of its inside."""

    def __init__(self, loss: LossConfig) -> None:
        self.losses = UpdateWatch(loss)
        self.seen: list[BackendState] = []
        self.held: list[float] = []  # norms of the gradients with which updates began

    def seeing_gradients(
        self, loss: LossFunction, gradients: Callable[[], Sequence[torch.Tensor]]
    ) -> LossFunction:
        def seeing(outputs: Any, inputs: Any) -> torch.Tensor:
            self.held.append(float(gradients()[0].norm()))
            return loss(outputs, inputs)

        return seeing

    def seeing_first_layer(self, layer: torch.nn.Module | None) -> AbstractContextManager[None]:
        return nullcontext()

    def updating(self, tensors: Callable[[], Sequence[UpdatedTensor]]) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, now: BackendState) -> None:
        self.seen.append(now)

    end = begin


class Updating:
    """One update of ``ByHand``."""

    def __init__(self, objective: Objective, loss: LossConfig) -> None:
        self.backend, self.watch = ByHand(objective), Watch(loss)
        if isinstance(objective, PolicyObjective):  # a critic is not watched
            self.backend.watch = self.watch
        self.result: dict[str, float] = {}

    @property
    def gradients(self) -> torch.Tensor:
        return self.backend.gradients

    def accumulate(self, part: Sequence[int]) -> None:
        specs = tuple(MicroBatch((row,), max(LENGTHS)) for row in range(len(part)))
        counted = GlobalBatch(num_samples=99, num_tokens=99, micro_batches=specs)
        self.backend.accumulate(batch_of(part), Schedule((counted,)))

    def train(self, update: GlobalBatch) -> None:
        metrics = self.backend.train(batch_of(range(6)), Schedule((update,)))
        self.result = {name: metric.value for name, metric in metrics.items()}


def at_once(objective: Objective, loss: LossConfig) -> Updating:
    updating = Updating(objective, loss)
    updating.train(WHOLE)
    return updating


def in_parts(objective: Objective, loss: LossConfig, parts: Sequence[Sequence[int]]) -> Updating:
    updating = Updating(objective, loss)
    for part in parts:
        updating.accumulate(part)
    updating.train(NONE)
    return updating


@st.composite
def cuts(draw: st.DrawFn) -> list[list[int]]:
    """The six samples in any order, cut anywhere."""
    order = draw(st.permutations(range(6)))
    ends = [*sorted(draw(st.sets(st.integers(1, 5)))), 6]
    return [list(order[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=30)
@given(parts=cuts())
def test_any_cut_gives_gradient_metrics_and_losses_of_the_whole(name: str, parts: list[list[int]]) -> None:
    cfg = LOSSES[name]
    objective = PolicyObjective(cfg, 1.0)
    expected, found = at_once(objective, cfg), in_parts(objective, cfg, parts)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=2e-6, atol=1e-7)
    assert found.result == pytest.approx(expected.result, rel=2e-6)
    measured = found.watch.losses.measured()
    assert measured[Measured.num_trained_tokens] == WHOLE.num_tokens
    assert measured[Measured.loss_error] < 1e-5
    assert measured[Measured.loss_gradient_error] < 1e-5


@settings(max_examples=30)
@given(parts=cuts())
def test_a_critics_loss_is_cut_in_the_same_way(parts: list[list[int]]) -> None:
    objective = ValueObjective(CRITIC)
    expected, found = at_once(objective, CONFIG), in_parts(objective, CONFIG, parts)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=2e-6, atol=1e-7)
    assert found.result == pytest.approx(expected.result, rel=2e-6)


class NotSpread(LossScaler):
    """A scaler of one rank without torch.distributed."""

    def unscale(self, gradients: Sequence[torch.Tensor], device: torch.device) -> bool:
        for gradient in gradients:
            gradient.div_(self.scale)
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        self.move(is_finite=is_finite)
        return is_finite


def in_float16(scale: float) -> Updating:
    updating = Updating(PolicyObjective(FULL, 1.0), FULL)
    updating.backend._scaler = NotSpread(replace(CRITIC.loss_scaling, initial_loss_scale=scale))
    return updating


def test_a_scaled_loss_gives_the_gradient_and_the_metrics_of_one_that_is_not() -> None:
    expected = at_once(PolicyObjective(FULL, 1.0), FULL)
    whole, parts = in_float16(1024.0), in_float16(1024.0)
    whole.train(WHOLE)
    for part in ([0, 1, 2], [3, 4, 5]):
        parts.accumulate(part)
    # As large as a mean over an update of samples that are as long as they may be.
    size = CRITIC.train_global_batch_size * CRITIC.max_total_sequence_length
    assert 0.25 < parts.gradients.abs().max() / (1024.0 * whole.gradients.abs().max() * 15 / size) < 4
    parts.train(NONE)
    scaling = {"loss_scale": 1024.0, "skipped_updates": 0.0, "skipped_in_a_row": 0.0}
    for found in (whole, parts):
        torch.testing.assert_close(found.gradients, expected.gradients, rtol=2e-6, atol=1e-7)
        assert found.result == pytest.approx({**expected.result, **scaling}, rel=2e-6)
        assert found.watch.losses.measured()[Measured.loss_gradient_error] < 1e-5


def test_an_update_with_an_overflow_is_skipped_and_the_schedule_with_it() -> None:
    updating = in_float16(2.0**100)
    updating.gradients[0] = torch.inf
    updating.train(WHOLE)
    assert not updating.gradients.any()
    assert (updating.backend.num_updates, updating.backend.rates) == (0, [])
    assert updating.result["loss_scale"] == 2.0**99
    assert updating.result["skipped_updates"] == updating.result["skipped_in_a_row"] == 1.0
    updating.backend.watch = Watch(FULL)
    updating.train(WHOLE)
    assert (updating.backend.num_updates, len(updating.backend.rates)) == (1, 1)
    assert updating.result["skipped_updates"] == updating.result["skipped_in_a_row"] == 0.0


def test_a_share_that_is_not_the_counts_own_is_noticed() -> None:
    objective = PolicyObjective(CONFIG, 1.0)
    updating = Updating(objective, CONFIG)
    updating.accumulate(range(6))
    updating.watch.losses.normalise(WHOLE, 1.01 / WHOLE.num_tokens)
    assert updating.watch.losses.measured()[Measured.loss_gradient_error] > 5e-3
    assert updating.watch.losses.measured()[Measured.loss_error] > 1e-3


ONE = replace(WHOLE, micro_batches=(MicroBatch((0,), 3),))


def test_only_the_first_update_has_no_micro_batches_and_only_after_accumulation() -> None:
    check_accumulated(Schedule((ONE, ONE)), is_held=False)
    check_accumulated(Schedule((NONE, ONE)), is_held=True)
    with pytest.raises(RuntimeError, match="for the first update, and the schedule computes it again"):
        check_accumulated(Schedule((ONE, ONE)), is_held=True)
    with pytest.raises(RuntimeError, match="computes nothing in its first update, and no gradients"):
        check_accumulated(Schedule((NONE,)), is_held=False)
    with pytest.raises(RuntimeError, match="only the first update"):
        check_accumulated(Schedule((NONE, NONE)), is_held=True)


def test_a_dropped_part_leaves_nothing_to_the_next_update() -> None:
    objective = PolicyObjective(FULL, 1.0)
    updating = Updating(objective, FULL)
    updating.accumulate([0, 3])
    updating.backend.drop_accumulated()
    updating.backend.watch = Watch(FULL)
    updating.train(WHOLE)
    expected = at_once(objective, FULL)
    torch.testing.assert_close(updating.gradients, expected.gradients)
    assert updating.result == expected.result


def test_the_learning_rate_follows_the_updates_of_all_phases() -> None:
    backend = ByHand(ValueObjective(CRITIC))
    for update in (WHOLE, WHOLE):
        backend.train(batch_of(range(6)), Schedule((update, update)))
    rates = [learning_rate(number, CRITIC.optimizer.lr, CRITIC.scheduler) for number in (1, 2, 3, 4)]
    assert backend.rates == rates
    assert backend.num_updates == 4


def test_the_watch_sees_what_a_phase_begins_and_ends_with() -> None:
    updating = Updating(PolicyObjective(CONFIG, 1.0), CONFIG)
    updating.accumulate(range(6))
    assert updating.watch.seen == []
    updating.train(NONE)
    assert [one.num_updates for one in updating.watch.seen] == [0, 1]
    assert [one.optimizer_steps for one in updating.watch.seen] == [[0], [1]]
