"""AdamW or Muon on the sharded parameters, with gradient clipping over all ranks.

AdamW works element by element, so it needs no communication; only the gradient norm does. Muon gathers one
parameter after the other on all ranks, each of which then keeps its part of the change. Norm and clipping
are computed here: ``torch.nn.utils.clip_grad_norm_`` refuses the two meshes that parameters have under tensor
parallelism, and even with one mesh its norm or its factor differs in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_like.policy.backends.muon import MOMENTUM, Muon, WholeMatrices
from nemo_like.policy.fsdp.weights import gathered, local_part
from nemo_like.policy.loss.updated_tensors import UpdatedTensor, is_matrix
from nemo_like.policy.options import TrainedGroupConfig

# Keeps the clipping factor finite; the same constant as in torch.nn.utils.clip_grad_norm_.
_NORM_EPSILON = 1e-6
_MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedOptimizer:
    """Muon on the ``matrices`` among the trained ``parameters``, and AdamW on all others; biases and norms
    have no weight decay.

    ``matrices`` has what finds the matrices in each whole parameter, by name. ``partial_gradients`` names the
    parameters whose gradients this optimizer sums over ``tensor_group``, because each of its ranks computes
    only a part of the sum.
    """

    def __init__(
        self,
        parameters: Mapping[str, DTensor],
        cfg: TrainedGroupConfig,
        device: torch.device,
        *,
        matrices: Mapping[str, WholeMatrices],
        partial_gradients: Collection[str],
        tensor_group: dist.ProcessGroup,
    ) -> None:
        self._max_norm, self._device = cfg.max_grad_norm, device
        self._muon, self._matrices = Muon.of(cfg), matrices
        self._weight_decay = cfg.optimizer.weight_decay
        self._momenta: dict[str, DTensor] = {}
        self._parameters, self._partial = dict(parameters), partial_gradients
        self._tensor_group = tensor_group
        adam, of_adam = cfg.optimizer, {name: parameters[name] for name in parameters if name not in matrices}
        self._adam = torch.optim.AdamW(
            [
                {
                    "params": [one for name, one in of_adam.items() if is_matrix(name, one)],
                    "weight_decay": adam.weight_decay,
                },
                {
                    "params": [one for name, one in of_adam.items() if not is_matrix(name, one)],
                    "weight_decay": 0.0,
                },
            ],
            lr=adam.lr,
            betas=(adam.adam_beta1, adam.adam_beta2),
            eps=adam.adam_eps,
            fused=True,
        )

    def step(self, learning_rate: float) -> float:
        """Clip the gradients, update the parameters, and free the gradients; return the norm of the gradient
        over all ranks before clipping."""
        grads = self.gradients()
        self._sum_over_tensor_ranks([grad for name, grad in grads.items() if name in self._partial])
        norm = self._norm(grads)
        if norm > self._max_norm:
            torch._foreach_mul_(list(grads.values()), self._max_norm / (norm + _NORM_EPSILON))
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self._update_matrices(grads, learning_rate)
        self.drop_gradients()
        return norm

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients by ``factor``."""
        if grads := list(self.gradients().values()):
            torch._foreach_mul_(grads, factor)

    def drop_gradients(self) -> None:
        """Free the gradients without an update."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def moments(self) -> dict[str, DTensor]:
        """Return Adam's two moments, or Muon's momentum, of every parameter, cut like the parameter; they are
        0 before the first update.

        The tensors are the optimizer's own, so writing to them changes its state.
        """
        found = {}
        for name, parameter in self._parameters.items():
            if name in self._matrices:
                found[f"{name}.{MOMENTUM}"] = self._momentum(name)
                continue
            state = self._adam.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state.update({moment: torch.zeros_like(parameter.detach()) for moment in _MOMENTS})
            found.update({f"{name}.{moment}": state[moment] for moment in _MOMENTS})
        return found

    def first_moments(self) -> list[Tensor]:
        """Return this rank's parts of the existing first moments; they are the optimizer's own tensors."""
        states = self._adam.state.values()
        return [state["exp_avg"].to_local() for state in states if "exp_avg" in state]

    def momenta(self) -> list[Tensor]:
        """Return this rank's parts of Muon's existing momenta; they are the optimizer's own tensors."""
        return [momentum.to_local() for momentum in self._momenta.values()]

    def updated_tensors(self) -> Iterator[UpdatedTensor]:
        """Yield this rank's parts of the parameters with their groups and states, which are the optimizer's
        own."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        for group in self._adam.param_groups:
            for parameter in group["params"]:
                state = self._adam.state.get(parameter, {})
                yield UpdatedTensor(
                    name=names[parameter],
                    weight=parameter.detach().to_local(),
                    is_matrix=is_matrix(names[parameter], parameter),
                    group=group,
                    state={
                        name: value.to_local() if isinstance(value, DTensor) else value
                        for name, value in state.items()
                    },
                )

    def step_counts(self) -> list[int]:
        """Return how many updates Adam has made; a parameter without a gradient may have had fewer."""
        counts = [int(state["step"]) for state in self._adam.state.values() if "step" in state]
        return [max(counts)] if counts else []

    def of_groups(self, name: str) -> list[float]:
        """Return the present value of one of AdamW's settings for each of its parameter groups."""
        return [float(group[name]) for group in self._adam.param_groups]

    def continue_after(self, num_updates: int) -> None:
        """Set Adam's count of every parameter's updates to ``num_updates``, the number of updates that made
        the loaded ``moments``."""
        for state in self._adam.state.values():
            state["step"].fill_(num_updates)

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's parts of the gradients by the names of their parameters."""
        return {
            name: parameter.grad.to_local()
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }

    def _momentum(self, name: str) -> DTensor:
        if name not in self._momenta:
            self._momenta[name] = torch.zeros_like(self._parameters[name].detach())
        return self._momenta[name]

    def _update_matrices(self, grads: Mapping[str, Tensor], learning_rate: float) -> None:
        """Update the parameters of Muon that have a gradient; every rank calls this."""
        for name, find in self._matrices.items():
            if name not in grads:
                continue
            parameter = self._parameters[name]
            self._muon.update(
                parameter.detach().to_local(),
                grads[name],
                self._momentum(name).to_local(),
                partial(self._of_whole, parameter, find),
                rate=learning_rate,
                decay=self._weight_decay,
            )

    def _of_whole(
        self,
        parameter: DTensor,
        find: WholeMatrices,
        part: Tensor,
        function: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Apply ``function`` to each matrix that ``find`` finds in the whole tensor of ``part``; return this
        rank's part of the results."""
        whole = find(gathered(part.to(self._device), parameter), function)
        return local_part(whole, parameter).to(part.device)

    def _norm(self, grads: Mapping[str, Tensor]) -> float:
        """Return the norm over all ranks.

        Each rank adds the squares of its parts; a part of which every tensor-parallel rank has a copy counts
        once.
        """
        squares = []
        for wanted, copies in ((True, 1), (False, self._tensor_group.size())):
            parts = [
                grad
                for name, grad in grads.items()
                if _is_cut_over_tensor_ranks(self._parameters[name]) is wanted
            ]
            squares.append(torch.nn.utils.get_total_norm(parts).to(self._device).square() / copies)
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def _sum_over_tensor_ranks(self, grads: list[Tensor]) -> None:
        """Sum the gradients over the tensor-parallel ranks, in place, in one collective."""
        if not grads:
            return
        flat = torch.cat([grad.flatten() for grad in grads]).to(self._device)
        dist.all_reduce(flat, group=self._tensor_group)
        for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))


def _is_cut_over_tensor_ranks(parameter: DTensor) -> bool:
    """Return whether tensor-parallel ranks hold different parts of the parameter; their axis is the last of
    the two-dimensional mesh (data, tensor)."""
    return parameter.device_mesh.ndim == 2 and not parameter.placements[1].is_replicate()


def is_whole_over_tensor_ranks(parameter: DTensor) -> bool:
    """Return whether several tensor-parallel ranks hold equal copies of the parameter."""
    return parameter.device_mesh.ndim == 2 and bool(parameter.placements[1].is_replicate())
