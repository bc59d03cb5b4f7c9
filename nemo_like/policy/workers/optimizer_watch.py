"""Measures for the tripwires what an optimizer does: its settings, one update, and what it leaves still.

before an update, after it    ──▶ some elements of each tensor ──▶ ``tripwires.reference_updates``
after the last update         ──▶ the settings of its groups, and moments that are 0 throughout
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_like.policy.loss.updated_tensors import UpdatedTensor
from nemo_like.policy.options import TrainedGroupConfig, ValueConfig
from nemo_like.policy.workers.weight_samples import spread
from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.reference_updates import UPDATE_RULES, Sampled, UpdateSettings

# Elements of each tensor whose update is computed a second time.
_SAMPLED_ELEMENTS = 64
# Tensors that have a gradient only where a batch comes to them, by parts of their names.
# The router of a single expert has none, since its weight is 1.
_SPARSE = ("embed", "expert", "router", ".gate.", "vision", "visual", "multi_modal")
_OF_VOCABULARY = ("output_layer", "lm_head")  # a critic's output layer has no vocabulary
# Above the rounding of moments in bfloat16, and below what two gradients make of their ratio.
_RATIO_TOLERANCE = 0.05


class OptimizerWatch:
    """Measures the first update of each training phase that is watched, and the settings after the last."""

    def __init__(self, cfg: TrainedGroupConfig) -> None:
        self._cfg = cfg
        self._may_be_still = _SPARSE if isinstance(cfg, ValueConfig) else (*_SPARSE, *_OF_VOCABULARY)
        self._before: Sampled | None = None
        self.named: list[str] = []  # tensors of this rank that are not as they should be, and what is wrong

    def before_update(self, tensors: Sequence[UpdatedTensor]) -> None:
        """Keep some elements of each tensor."""
        self._before = _sampled(tensors)

    def after_update(self, tensors: Sequence[UpdatedTensor]) -> dict[Measured, float]:
        """Compare the update with its formula, by the configured settings and the optimizer's rate."""
        before, self._before = self._before, None
        assert before is not None, "`before_update` comes first"
        if self._cfg.megatron_cfg.optimizer_kwargs:  # which may change the formula
            return {}
        after, counts = _sampled(tensors), _counts(tensors)
        greatest = [0.0] * len(tensors)
        for kept, rule in UPDATE_RULES.items():
            is_judged = torch.tensor([frozenset(one.state) - {"step"} == kept for one in tensors])
            if not is_judged.any():
                continue
            chosen = is_judged.repeat_interleave(counts)
            excess = torch.zeros(len(chosen), dtype=torch.float64)
            excess[chosen] = rule(
                before.only(chosen), after.only(chosen), self._settings(tensors, counts, chosen)
            )
            parts = excess.split(counts.tolist())
            greatest = [
                max(one, float(part.max())) if len(part) else one
                for one, part in zip(greatest, parts, strict=True)
            ]
        wrong = [one.name for one, value in zip(tensors, greatest, strict=True) if value > 1]
        self.named += [f"{name} (update)" for name in wrong]
        return {
            Measured.update_excess: max(greatest, default=0.0),
            Measured.num_wrong_updates: float(len(wrong)),
        }

    def settings(self, tensors: Sequence[UpdatedTensor]) -> dict[Measured, float]:
        """Return how far the settings of the optimizer's groups are from the configured ones."""
        adam = self._cfg.optimizer
        betas, decays = (adam.adam_beta1, adam.adam_beta2), (0.0, adam.weight_decay)
        gaps = {Measured.betas_gap: 0.0, Measured.eps_gap: 0.0, Measured.weight_decay_gap: 0.0}
        for group in {id(one.group): one.group for one in tensors}.values():
            found = {
                Measured.betas_gap: max(
                    abs(x - y) for x, y in zip(group.get("betas", betas), betas, strict=True)
                ),
                Measured.eps_gap: abs(group.get("eps", adam.adam_eps) - adam.adam_eps),
                Measured.weight_decay_gap: min(abs(group["weight_decay"] - decay) for decay in decays),
            }
            gaps = {name: max(value, found[name]) for name, value in gaps.items()}
        return gaps

    def still(self, tensors: Sequence[UpdatedTensor]) -> dict[Measured, float]:
        """Count the tensors that never had a gradient, where others had one and each of them should.

        Nothing is counted before the second gradient: an adapter's first factor has none before its second
        factor has moved. Updates of batches without any advantage bring none.
        """
        judged = [one for one in tensors if "exp_avg" in one.state]
        first, second = (
            _joined([spread(one.state[name], _SAMPLED_ELEMENTS) for one in judged])
            for name in ("exp_avg", "exp_avg_sq")
        )
        if not _had_two_gradients(first, second):
            return {}
        wrong = [
            one.name
            for one, part in zip(judged, first.split(_counts(judged).tolist()), strict=True)
            if len(part) and not part.any() and not any(word in one.name for word in self._may_be_still)
        ]
        self.named += [f"{name} (no gradient)" for name in wrong]
        return {Measured.num_still_tensors: float(len(wrong))}

    def _settings(self, tensors: Sequence[UpdatedTensor], counts: Tensor, chosen: Tensor) -> UpdateSettings:
        adam = self._cfg.optimizer

        def each(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).repeat_interleave(counts)[chosen]

        dtypes = {
            value.dtype
            for one in tensors
            for value in (one.weight, *one.state.values())
            if isinstance(value, Tensor)
        }
        return UpdateSettings(
            rates=each([one.group["lr"] for one in tensors]),
            decays=each([adam.weight_decay if one.is_matrix else 0.0 for one in tensors]),
            num_updates=each([float(one.num_updates) for one in tensors]),
            beta1=adam.adam_beta1,
            beta2=adam.adam_beta2,
            eps=adam.adam_eps,
            roundoff=max(torch.finfo(dtype).eps for dtype in dtypes) / 2,
        )


def _had_two_gradients(first: Tensor, second: Tensor) -> bool:
    """Say whether Adam's moments are those of more than one gradient.

    After a single one, first² / second is the same for all elements: (1 - β1)² β1²ᵃ / ((1 - β2) β2ᵃ), where
    a counts the updates since, which had none.
    """
    had_one = second > torch.finfo(torch.float32).tiny
    ratios = first[had_one] ** 2 / second[had_one]
    return bool(len(ratios)) and bool(ratios.max() > (1 + _RATIO_TOLERANCE) * ratios.min())


def _counts(tensors: Sequence[UpdatedTensor]) -> Tensor:
    return torch.tensor([spread(one.weight, _SAMPLED_ELEMENTS).numel() for one in tensors], dtype=torch.int64)


@torch.no_grad()
def _sampled(tensors: Sequence[UpdatedTensor]) -> Sampled:
    """Return some elements of each tensor and of its state, where a state that is not there yet is 0."""
    weights = [spread(one.weight, _SAMPLED_ELEMENTS) for one in tensors]
    state = {
        name: [
            spread(one.state[name], _SAMPLED_ELEMENTS) if name in one.state else torch.zeros_like(weight)
            for one, weight in zip(tensors, weights, strict=True)
        ]
        for name in sorted(frozenset().union(*UPDATE_RULES))
    }
    return Sampled(_joined(weights), {name: _joined(parts) for name, parts in state.items()})


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts]).double().cpu() if parts else torch.empty(0, dtype=torch.float64)
