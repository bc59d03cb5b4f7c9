"""Judges the numbers measured of weights: in engines, in training and between trainings. Standard library
only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nemo_like.policy.options import OptimizerConfig, OptimizerKind, Precision, TrainedGroupConfig
from nemo_like.tripwires.alarm import Alarm
from nemo_like.tripwires.measured import Measured

# The rounding of a stored weight, relative to it; twice the unit roundoff.
_ROUNDING = {Precision.float32: 2.0**-23, Precision.bfloat16: 2.0**-7, Precision.float16: 2.0**-10}
# A slack of 5 % for the rounding of Adam's own arithmetic.
_SLACK = 1.05
# What Muon moves a weight by at a learning rate and a scale of 1: sqrt(rows or columns), of which no matrix
# has more than 65,536, times a singular value, which Newton and Schulz's iteration leaves below 1.25.
_MUON_BOUND = 65_536**0.5 * 1.25
_NAMES = {OptimizerKind.adamw: "AdamW", OptimizerKind.muon: "Muon"}


def digest_alarms(measured: Mapping[str, float], sent: Sequence[float]) -> Iterator[Alarm]:
    """Yield an alarm unless the weights that sampled each response have a digest that is in ``sent``.

    ``sent`` has the digests of the versions from which the rollout's responses may come; when it is empty,
    nothing is judged.
    """
    low, high = measured.get(Measured.engine_digest_min), measured.get(Measured.engine_digest_max)
    if not sent or low is None or high is None or (low in sent and high in sent):
        return
    engines = f"{int(low):x}" if low == high else f"{int(low):x} and {int(high):x}"
    yield Alarm(
        tripwire="weights_digest",
        wrong=f"the trainer sent weights with digest {' and '.join(f'{int(one):x}' for one in sent)}, and "
        f"engines sampled with {engines}",
        look_at="what a weight passes on its way (weight_transport/, generation/weight_receiver.py)",
    )


def weight_alarms(measured: Mapping[str, float]) -> Iterator[Alarm]:
    """Yield an alarm for weights that changed where they must not: the policy's outside training, or the
    reference's."""
    if measured.get(Measured.weights_moved_elsewhere):
        yield Alarm(
            tripwire="weights_kept",
            wrong="the policy's weights when training began were not those when it had ended before",
            look_at="what touches weights between phases: the reference policy "
            "(policy/backends/kept_weights.py), parking (policy/backends/parking.py), loading",
        )
    if measured.get(Measured.reference_moved):
        yield Alarm(
            tripwire="reference_kept",
            wrong="the reference policy's weights are not those with which the run's processes began",
            look_at="policy/backends/kept_weights.py, and the loading of checkpoints",
        )
    if measured.get(Measured.has_policy_as_reference):
        yield Alarm(
            tripwire="reference_kept",
            wrong="the reference gives the policy's own log-probs to the bit, though their weights differ",
            look_at="with which weights reference_logprobs are computed (policy/backends/kept_weights.py)",
        )


def change_alarms(
    measured: Mapping[str, float],
    cfg: TrainedGroupConfig,
    *,
    learning_rates: float,
    gradient_norm: float,
) -> Iterator[Alarm]:
    """Yield an alarm when training changed no weight, or changed one by more than the optimizer can.

    ``learning_rates`` is the sum of the rates of the step's updates; ``gradient_norm`` is their mean gradient
    norm before clipping.
    """
    moved = measured.get(Measured.weights_moved)
    if moved is None:
        return
    if moved == 0.0 and gradient_norm > 0.0 and learning_rates > 0.0:
        yield Alarm(
            tripwire="weights_change",
            wrong=f"the updates changed no weight, with a gradient norm of {gradient_norm:.3g}",
            look_at="the optimizer: whether it holds the model's own parameters",
            ends_run=cfg.precision is Precision.float32,
        )
    largest = measured[Measured.largest_weight] + moved
    limit = largest_change(cfg.optimizer, learning_rates, largest)
    allowed = None if limit is None else limit + _ROUNDING[cfg.precision] * largest
    if allowed is not None and not moved <= allowed:
        yield Alarm(
            tripwire="weights_change",
            wrong=f"a weight changed by {moved:.3g} in one step, and {_NAMES[cfg.optimizer.kind]} allows at "
            f"most {allowed:.3g}",
            look_at="the learning rate that the optimizer has, and whether its state is this model's",
        )


def largest_change(cfg: OptimizerConfig, learning_rates: float, largest_weight: float) -> float | None:
    """Return by how much the optimizer can change a weight in updates whose learning rates add up to
    ``learning_rates``.

    By Cauchy and Schwarz, AdamW's first moment over the root of the second is at most (1 - b1) / sqrt((1 -
    b2) (1 - b1^2 / b2)), or 1 (cf. Kingma and Ba, arXiv 1412.6980, section 2.1). None where b1^2 >= b2, for
    which there is no bound.
    """
    beta1, beta2 = cfg.adam_beta1, cfg.adam_beta2
    if beta1 * beta1 >= beta2:
        return None
    bound = max(1.0, (1 - beta1) / ((1 - beta2) * (1 - beta1 * beta1 / beta2)) ** 0.5)
    if cfg.kind is OptimizerKind.muon:
        bound = max(bound, cfg.muon_scale * _MUON_BOUND)
    return _SLACK * learning_rates * (bound + cfg.weight_decay * largest_weight)
