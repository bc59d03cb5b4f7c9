"""Runs micro-batches through Megatron-core's pipeline schedules, forward only or forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_like.batch.meta import MicroBatch, MicroBatchLayout, Schedule
from nemo_like.compat.cpu_shim import plain_torch
from nemo_like.policy.batch.context_parts import ContextRank
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch
from nemo_like.policy.loss.objective import LossFunction
from nemo_like.policy.megatron.model_chunks import NeighbourCommunicator, without_sync
from nemo_like.policy.megatron.modules import has_fused_layers, packed_parameters
from nemo_like.policy.megatron.router_replay import RouteReplay

# The last pipeline stage calls this with each micro-batch's TokenScores or TokenValues.
OnScored = Callable[[Any, ModelInputs], None]


class Pipeline:
    """Runs a model over micro-batches, whose padded lengths must be multiples of ``length_multiple``."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel | torch.nn.Module],
        config: TransformerConfig,
        length_multiple: int,
        replay: RouteReplay,
    ) -> None:
        """Keep the stage's chunks of the model, of which there is one unless the pipeline is interleaved.
        Only ``forward`` works unless they sum gradients over ranks."""
        self._chunks, self._config, self._length_multiple = [*chunks], config, length_multiple
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
            with without_sync(self._chunks):
                self.forward_backward(batch, schedule, specs, loss)
        finally:
            config.no_sync_func, config.finalize_model_grads_func = no_sync, finalize

    def reduce_accumulated(self, factor: float) -> None:
        """Multiply the accumulated gradients by ``factor`` and sum them over all ranks."""
        for chunk in self._chunks:
            chunk.scale_gradients(factor)
            if chunk.ddp_config.overlap_grad_reduce:
                chunk.start_grad_sync()
        sum_gradients(self._chunks)

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
                spec, is_extra = next(specs_left)
                inputs = batch.micro_batch(spec, schedule, self._context)
                if is_extra:
                    inputs = inputs.without_outputs()
                with self._replay.replaying(inputs):
                    output = model(
                        inputs.input_ids,
                        inputs.position_ids,
                        None,
                        labels=inputs,
                        packed_seq_params=packed_parameters(
                            inputs, self._context, rotates_by_length=by_length
                        ),
                    )
            if isinstance(output, Tensor):
                return output, score  # an earlier stage scores nothing
            # Megatron-core expects a model to return a tensor.
            scored = _score_nothing if is_extra else score
            return output.tensors[0], lambda _, **options: scored(output, inputs, **options)

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
        run, num_stages = self._schedule(), self._config.pipeline_model_parallel_size
        num_extra = -len(specs) % num_stages if len(self._chunks) > 1 else 0
        passes = [(spec, False) for spec in specs] + [(specs[-1], True)] * num_extra
        iterators = [iter(passes) for _ in self._chunks]
        run(
            forward_step_func=step,
            data_iterator=iterators if len(self._chunks) > 1 else iterators[0],
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(passes),
            seq_length=num_positions,
            micro_batch_size=num_rows,
            **options,
        )

    def _schedule(self) -> Callable[..., Any]:
        """Return Megatron-core's schedule for this rank's chunks."""
        if len(self._chunks) == 1:
            return get_forward_backward_func()
        groups = ProcessGroupCollection.use_mpu_process_groups(
            ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"]
        )
        return partial(
            get_forward_backward_func(groups.pp.size(), len(self._chunks)),
            p2p_communicator=NeighbourCommunicator(groups.pp, self._config),
            pg_collection=groups,
        )


def _score_nothing(output: Any, inputs: ModelInputs, *, non_loss_data: bool = False) -> Any:
    """Return what Megatron-core wants of a micro-batch without scored tokens: a loss of 0, or no data."""
    if non_loss_data:
        return None
    zero = output.tensors[0].sum()
    return zero, torch.zeros((), dtype=torch.int, device=zero.device), {}


def sum_gradients(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Reduce gradients over ranks as Megatron-core does, without its division by a token count."""
    finalize_model_grads(model, None, **options)
