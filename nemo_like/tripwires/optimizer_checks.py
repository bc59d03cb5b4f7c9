"""Judges what was measured of gradients, of an optimizer's settings and updates, and of restored state.
Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nemo_like.policy.options import Device, Precision, TrainedGroupConfig
from nemo_like.tripwires.alarm import Alarm
from nemo_like.tripwires.measured import Measured

# A setting passes through float32 in some libraries.
_SETTING_TOLERANCE = 2.0**-22
# Four terms of float32, each half a unit in the last place from its exact value, and as much again.
_GAE_TOLERANCE = 2.0**-21
# Of the largest value. A value is a sum over the hidden state, whose rounding may be sixty times its own.
_VALUE_GAP = {(Device.cpu, Precision.float32): 2.0**-10}
_VALUE_GAP_ELSEWHERE = 0.5


def gradient_alarms(
    measured: Mapping[str, float], named: Sequence[str], gradient_norm: float | None
) -> Iterator[Alarm]:
    """Yield an alarm when an update began with gradients, when a tensor never has one, when none reaches the
    first layer though weights have a gradient of norm ``gradient_norm``, or when the loss alone has one.

    ``named`` are the tensors that workers blame, here and below; ``gradient_norm`` is None where no update
    was made.
    """
    if norm := measured.get(Measured.held_gradient):
        yield Alarm(
            tripwire="gradients_cleared",
            wrong=f"an update began with gradients of norm {norm:.3g}, to which its own were added",
            look_at="what clears gradients before an update (_clear_gradients in policy/megatron/backend.py "
            "and policy/fsdp/backend.py)",
        )
    # A critic's output layer begins with 0, and passes nothing back in its first update.
    is_seen = measured.get(Measured.num_first_layers, 0.0) > 0 and measured.get(Measured.num_updates, 0.0) > 1
    if is_seen and gradient_norm and measured.get(Measured.first_layer_gradient) == 0:
        yield Alarm(
            tripwire="still_tensors",
            wrong=f"the gradient does not reach the embedding's output: it is 0 there, with a norm of "
            f"{gradient_norm:.3g} over all weights",
            look_at="what detaches a layer's input or output",
        )
    if gradient_norm == 0 and (largest := measured.get(Measured.loss_gradient)):
        yield Alarm(
            tripwire="still_tensors",
            wrong=f"no weight has a gradient, and the loss has one of up to {largest:.3g} at a token",
            look_at="what passes the loss's gradient to the model's output layer",
        )
    if count := measured.get(Measured.num_still_tensors):
        yield Alarm(
            tripwire="still_tensors",
            wrong=f"{count:g} tensors never had a gradient, and others had one{_of(named, 'no gradient')}",
            look_at="what detaches the tensors' outputs, or freezes them, and the optimizer's groups",
        )


def setting_alarms(measured: Mapping[str, float], cfg: TrainedGroupConfig) -> Iterator[Alarm]:
    """Yield an alarm when a group of the optimizer has other betas, another eps or another weight decay than
    configured."""
    adam, label = cfg.optimizer, cfg.label
    for name, what, due, size in (
        (Measured.betas_gap, "betas are", (adam.adam_beta1, adam.adam_beta2), 1.0),
        (Measured.eps_gap, "eps is", adam.adam_eps, adam.adam_eps),
        (Measured.weight_decay_gap, "weight decay is", f"{adam.weight_decay:g} or 0", adam.weight_decay),
    ):
        gap = measured.get(name, 0.0)
        if not gap <= _SETTING_TOLERANCE * size:
            yield Alarm(
                tripwire="optimizer_settings",
                wrong=f"a parameter group's {what} {gap:.3g} from {label}.optimizer's {due}",
                look_at="what sets the groups (policy/megatron/optimizer.py, policy/fsdp/optimizer.py), and "
                "what a checkpoint restores",
            )


def update_alarms(measured: Mapping[str, float], named: Sequence[str]) -> Iterator[Alarm]:
    """Yield an alarm when an update is not what the optimizer's formula gives."""
    excess = measured.get(Measured.update_excess, 0.0)
    if not excess <= 1.0:
        yield Alarm(
            tripwire="update_formula",
            wrong=(
                f"{measured.get(Measured.num_wrong_updates, 0):g} tensors were not updated as the formula "
                f"of the optimizer says, by up to {excess:.3g} times what rounding allows"
                f"{_of(named, 'update')}"
            ),
            look_at="the optimizer's betas, eps, weight decay and rate, and whether it updates these tensors "
            "(tripwires/reference_updates.py has the formula)",
        )


def copy_alarms(
    measured: Mapping[str, float], named: Sequence[str], cfg: TrainedGroupConfig
) -> Iterator[Alarm]:
    """Yield an alarm when ranks that have copies of the same weights have different ones after an update."""
    if count := measured.get(Measured.num_unequal_copies):
        yield Alarm(
            tripwire="equal_copies",
            wrong=f"after the updates {count:g} sets of ranks do not have equal copies of their weights"
            f"{_of(named, 'unequal copies')}",
            look_at=f"whether gradients are summed over all ranks of {cfg.label}.data_parallel_size, and "
            "over tensor-parallel ranks where each computes a part",
        )


def restored_alarms(measured: Mapping[str, float], named: Sequence[str]) -> Iterator[Alarm]:
    """Yield an alarm when weights or moments that a checkpoint restored are not those of its saving."""
    for name, what in (
        (Measured.num_unlike_saved, "weights"),
        (Measured.num_unlike_moments, "moments of the optimizer"),
    ):
        if count := measured.get(name):
            yield Alarm(
                tripwire="restored_state",
                wrong=f"{count:g} {what} that a checkpoint restored are not those that the run had when it "
                f"saved it{_of(named, 'restored')}",
                look_at="what a checkpoint holds, and how it is loaded (policy/megatron/checkpoint.py, "
                "policy/fsdp/checkpoint.py)",
            )


def value_alarms(measured: Mapping[str, float], cfg: TrainedGroupConfig) -> Iterator[Alarm]:
    """Yield an alarm when a critic's advantages or returns are not GAE's, or its values in training not those
    with which they were estimated."""
    for name, what in ((Measured.advantage_error, "advantages"), (Measured.return_error, "returns")):
        error = measured.get(name, 0.0)
        if not error <= _GAE_TOLERANCE:
            yield Alarm(
                tripwire="gae",
                wrong=f"the critic's {what} miss GAE's equation by {error:.3g} of its terms; "
                f"{_GAE_TOLERANCE:.1g} is rounding",
                look_at="algorithms/generalised_advantages.py, and its rewards, masks and end values "
                "(policy/workers/value_worker.py)",
            )
    gap = measured.get(Measured.first_value_gap, 0.0)
    is_exact = (cfg.device, cfg.precision) in _VALUE_GAP
    limit = _VALUE_GAP.get((cfg.device, cfg.precision), _VALUE_GAP_ELSEWHERE)
    if not gap <= limit:
        yield Alarm(
            tripwire="first_values",
            wrong=f"in the first update values differ from the column `values` by up to {gap:.3g} of the "
            f"largest, over {limit:g}, though the weights are the same",
            look_at="at which tokens values stand (policy/workers/value_worker.py), micro-batches, dropout",
            ends_run=is_exact,
        )


def _of(named: Sequence[str], what: str) -> str:
    """Return the names that carry ``what``, after a colon; nothing without any."""
    end = f" ({what})"
    chosen = [name.removesuffix(end) for name in named if name.endswith(end)]
    return f": {', '.join(chosen)}" if chosen else ""
