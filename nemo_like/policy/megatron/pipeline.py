"""Runs micro-batches through Megatron-core's pipeline schedules, forward only or forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_like.batch.meta import MicroBatch, MicroBatchLayout, Schedule
from nemo_like.compat.cpu_shim import plain_torch
from nemo_like.policy.batch.policy_batch import ContextRank, ModelInputs, PolicyBatch
from nemo_like.policy.loss.objective import LossFunction
from nemo_like.policy.megatron.modules import has_fused_layers, packed_parameters
from nemo_like.policy.megatron.router_replay import RouteReplay

# The last pipeline stage calls this with each micro-batch's TokenScores or TokenValues.
OnScored = Callable[[Any, ModelInputs], None]


class Pipeline:
    """Runs a model over micro-batches, whose padded lengths must be multiples of ``length_multiple``."""

    def __init__(
        self,
        model: DistributedDataParallel | torch.nn.Module,
        config: TransformerConfig,
        length_multiple: int,
        replay: RouteReplay,
    ) -> None:
        """Keep the model. Only ``forward`` works unless ``model`` sums gradients over ranks."""
        self._model, self._config, self._length_multiple = model, config, length_multiple
        self._replay = replay
        self._context = ContextRank(
            parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        )
        # With several context ranks the rotary embedding asks for "cuda" in the forward pass.
        self._forward_mode = plain_torch if self._context.size == 1 else contextlib.nullcontext
        config.finalize_model_grads_func = sum_gradients

    def forward(
        self, batch: PolicyBatch, schedule: Schedule, specs: Sequence[MicroBatch], on_scored: OnScored
    ) -> None:
        """Score these micro-batches of the schedule. Raises ValueError for a padded length that is not a
        multiple of ``length_multiple``."""

        def score(scores: Any, inputs: ModelInputs, non_loss_data: bool) -> None:
            on_scored(scores, inputs)

        self._run(batch, schedule, specs, score, forward_only=True, collect_non_loss_data=True)

    def forward_backward(
        self, batch: PolicyBatch, schedule: Schedule, specs: Sequence[MicroBatch], loss: LossFunction
    ) -> None:
        """Score these micro-batches and accumulate the gradient of their loss, summed over all ranks. Raises
        ValueError as ``forward`` does."""
        # Megatron-core wants a token count to normalise by; the loss is normalised already, so it is 0.
        num_tokens = torch.zeros((), dtype=torch.int, device=batch.device)

        def score(scores: Any, inputs: ModelInputs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            with plain_torch():
                return loss(scores, inputs), num_tokens, {}

        self._run(batch, schedule, specs, score, forward_only=False)

    def accumulate(
        self, batch: PolicyBatch, schedule: Schedule, specs: Sequence[MicroBatch], loss: LossFunction
    ) -> None:
        """Compute gradients as ``forward_backward`` does, but leave on each rank the sum over its own
        micro-batches, to which later calls add. Raises ValueError as ``forward`` does."""
        config = self._config
        no_sync, finalize = config.no_sync_func, config.finalize_model_grads_func
        # Megatron-core would reduce with the last micro-batch, and reduce again what earlier calls reduced.
        config.no_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None
        try:
            with self._model.no_sync():
                self.forward_backward(batch, schedule, specs, loss)
        finally:
            config.no_sync_func, config.finalize_model_grads_func = no_sync, finalize

    def reduce_accumulated(self, factor: float) -> None:
        """Multiply the accumulated gradients by ``factor`` and sum them over all ranks."""
        self._model.scale_gradients(factor)
        if self._model.ddp_config.overlap_grad_reduce:
            self._model.start_grad_sync()
        sum_gradients([self._model])

    def _run(
        self,
        batch: PolicyBatch,
        schedule: Schedule,
        specs: Sequence[MicroBatch],
        score: Callable[..., Any],
        **options: Any,
    ) -> None:
        # With several context ranks Megatron-core finds the positions of a rank's tokens only by the lengths.
        by_length = has_fused_layers(self._config) or self._context.size > 1

        def step(specs_left: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            with self._forward_mode():
                inputs = batch.micro_batch(next(specs_left), schedule, self._context)
                with self._replay.replaying(inputs):
                    output = model(
                        inputs.input_ids,
                        inputs.position_ids,
                        None,
                        labels=inputs,
                        packed_seq_params=packed_parameters(inputs, rotates_by_length=by_length),
                    )
            if isinstance(output, Tensor):
                return output, score  # an earlier stage scores nothing
            # Megatron-core expects a model to return a tensor.
            return output.tensors[0], lambda _, **options: score(output, inputs, **options)

        is_padded = schedule.layout is MicroBatchLayout.padded
        shapes = {(len(spec.rows) if is_padded else 1, spec.padded_length) for spec in specs}
        num_rows, num_positions = max(shapes)
        uneven = [length for _, length in shapes if length % self._length_multiple]
        if uneven:
            raise ValueError(
                f"micro-batches are padded to {min(uneven)} tokens, but this layout needs a multiple of "
                f"{self._length_multiple}; make the schedule with that length_multiple"
            )
        # Pipeline stages tell each other the shapes only when the micro-batches' shapes differ.
        self._config.variable_seq_lengths = len(shapes) > 1
        self._replay.begin()
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(specs),
            model=self._model,
            num_microbatches=len(specs),
            seq_length=num_positions,
            micro_batch_size=num_rows,
            **options,
        )


def sum_gradients(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Reduce gradients over ranks as Megatron-core does, without its division by a token count."""
    finalize_model_grads(model, None, **options)
