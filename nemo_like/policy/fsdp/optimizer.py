"""AdamW on each rank's own parts of the parameters, with gradient clipping over all ranks.

AdamW works element by element, so the parts need no communication; only the gradient norm does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nemo_like.config.schema import PolicyConfig

# Keeps the clipping factor finite; the same constant as in torch.nn.utils.clip_grad_norm_.
_NORM_EPSILON = 1e-6
_MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """``parameters`` are those that train; biases and norms do not decay.

    ``partial_gradients`` name the ones whose gradients the ranks of ``tensor_group`` have to add up.
    """

    def __init__(
        self,
        parameters: Mapping[str, DTensor],
        cfg: PolicyConfig,
        device: torch.device,
        *,
        partial_gradients: Collection[str],
        tensor_group: dist.ProcessGroup,
    ) -> None:
        self._max_norm, self._device = cfg.max_grad_norm, device
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._parts = [torch.nn.Parameter(parameter.to_local().detach()) for parameter in self._parameters]
        self._is_cut = [_is_cut_over_tensor_ranks(parameter) for parameter in self._parameters]
        self._partial = [index for index, name in enumerate(parameters) if name in partial_gradients]
        self._tensor_group = tensor_group
        pairs = list(zip(self._parameters, self._parts, strict=True))
        adam = cfg.optimizer
        self._adam = torch.optim.AdamW(
            [
                {
                    "params": [part for parameter, part in pairs if parameter.dim() > 1],
                    "weight_decay": adam.weight_decay,
                },
                {"params": [part for parameter, part in pairs if parameter.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=adam.lr,
            betas=(adam.adam_beta1, adam.adam_beta2),
            eps=adam.adam_eps,
            fused=True,
        )

    def step(self, learning_rate: float) -> float:
        """Clip, update, and drop the gradients; the norm over all ranks before clipping."""
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            part.grad = None if parameter.grad is None else parameter.grad.to_local()
            parameter.grad = None
        self._sum_partial_gradients()
        norm = self._norm()
        if norm > self._max_norm:
            factor = self._max_norm / (norm + _NORM_EPSILON)
            torch._foreach_mul_([part.grad for part in self._parts if part.grad is not None], factor)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self._adam.zero_grad()
        return norm

    def moments(self) -> dict[str, DTensor]:
        """Adam's two moments of every parameter, cut as the parameter is; zero before the first update.
        They share the optimizer's memory."""
        found = {}
        for name, parameter, part in zip(self._names, self._parameters, self._parts, strict=True):
            state = self._adam.state[part]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
                state.update({moment: torch.zeros_like(part.data) for moment in _MOMENTS})
            for moment in _MOMENTS:
                found[f"{name}.{moment}"] = DTensor.from_local(
                    state[moment],
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
        return found

    def continue_after(self, num_updates: int) -> None:
        """Count on from so many updates, after which ``moments`` were read."""
        for part in self._parts:
            self._adam.state[part]["step"].fill_(num_updates)

    def _norm(self) -> float:
        """Each rank adds the squares of its parts; a part that all tensor-parallel ranks have counts once."""
        squares = []
        for wanted, copies in ((True, 1), (False, self._tensor_group.size())):
            grads = [
                part.grad
                for part, is_cut in zip(self._parts, self._is_cut, strict=True)
                if is_cut is wanted and part.grad is not None
            ]
            squares.append(torch.nn.utils.get_total_norm(grads).to(self._device).square() / copies)
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def _sum_partial_gradients(self) -> None:
        """In one collective."""
        grads = [grad for index in self._partial if (grad := self._parts[index].grad) is not None]
        if not grads:
            return
        flat = torch.cat([grad.flatten() for grad in grads]).to(self._device)
        dist.all_reduce(flat, group=self._tensor_group)
        for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))


def _is_cut_over_tensor_ranks(parameter: DTensor) -> bool:
    """Whether the last axis of a two-dimensional mesh, (data, tensor), holds different parts."""
    return parameter.device_mesh.ndim == 2 and not parameter.placements[1].is_replicate()
