"""The Megatron-core training backend: log-probs, optimizer updates and weights of a sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from nemo_like.algorithms.logprobs import LogprobSettings, TokenScores
from nemo_like.batch.meta import GlobalBatch, Schedule
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.config.derived import length_multiple
from nemo_like.config.model_info import ModelInfo, read_model_info
from nemo_like.config.schema import LossConfig, PolicyConfig
from nemo_like.observability.metrics import Metric
from nemo_like.policy.batch import ModelInputs, PolicyBatch
from nemo_like.policy.checkpoint_writer import CheckpointWriter
from nemo_like.policy.devices import DTYPES, compute_device
from nemo_like.policy.export import complete_checkpoint, write_weights
from nemo_like.policy.interface import Internals, is_weight_sender
from nemo_like.policy.learning_rate import learning_rate
from nemo_like.policy.megatron.checkpoint import load_checkpoint, save_checkpoint
from nemo_like.policy.megatron.convert import (
    Cut,
    Geometry,
    HFCheckpoint,
    ModelPart,
    Rule,
    full_shape,
    hf_tensors,
    load_weights,
    rules_of_all_ranks,
    single_experts,
    split,
)
from nemo_like.policy.megatron.cpu_shim import cuda_means_cpu
from nemo_like.policy.megatron.model import ScoringGPTModel, transformer_config
from nemo_like.policy.megatron.optimizer import adam_state, build_optimizer
from nemo_like.policy.megatron.pipeline import Pipeline
from nemo_like.policy.objective import own_means, update_objective
from nemo_like.policy.parallelism import shards_optimizer
from nemo_like.policy.parking import HostParking, stays_on_device
from nemo_like.policy.reference import ReferenceWeights, reference_in_place
from nemo_like.policy.temperature import at_temperature_one
from nemo_like.policy.train_metrics import TrainMetrics
from nemo_like.policy.update_watch import UpdateWatch
from nemo_like.weight_transport.buckets import TensorSpec


class MegatronPolicy:
    """One rank's part of the policy. torch.distributed must be initialised, with the coordinates' rank.

    Raises ValueError when the coordinates are not this rank's, and the errors of loading the checkpoint.
    """

    def __init__(
        self, cfg: PolicyConfig, loss: LossConfig, coordinates: Coordinates, temperature: float
    ) -> None:
        self.cfg, self.loss, self.coordinates = cfg, loss, coordinates
        self.device = compute_device(cfg.device)
        self.num_updates = 0
        self._temperature = temperature
        self._dtype = DTYPES[cfg.precision]
        self._source = Path(cfg.model_name)
        self._model_info = read_model_info(cfg.model_name, cfg.backend)
        self._geometry = Geometry.of(self._model_info, coordinates.layout.tp)
        with self._megatron():
            _initialise_parallel_state(coordinates)
            config = transformer_config(self._model_info, cfg, coordinates.layout)
            self._part = _model_part(coordinates, self._model_info)
            scoring = LogprobSettings(temperature=temperature, with_entropy=loss.entropy_coef is not None)
            self._model = ScoringGPTModel(
                config,
                self._model_info,
                scoring,
                self._part,
                shares_prompts=cfg.sequence_packing.share_prompts,
            )
            self._model.to(self.device)
            self._load_weights()
            self._reference = (
                ReferenceWeights(lambda: [*self._model.parameters()], cfg.reference_placement)
                if loss.reference_policy_kl_penalty > 0
                else None
            )
            ddp_config = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=coordinates.layout.dp * coordinates.layout.cp > 1,
                use_distributed_optimizer=shards_optimizer(cfg),
            )
            self._ddp = DistributedDataParallel(config, ddp_config, self._model)
            self._optimizer = build_optimizer(cfg, self._ddp, self._dtype)
            config.no_sync_func = self._ddp.no_sync
            if cfg.offload_optimizer_for_logprob:
                self._offload_optimizer()
            self._pipeline = Pipeline(self._ddp, config, length_multiple(cfg))
        leaves = cfg.offload_parameters_between_phases
        self._weights_in_use = HostParking(self._model.parameters()).in_use if leaves else stays_on_device

    # Log-probs

    @torch.no_grad()
    def logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Score the batch; every rank returns all log-probs, packed [sum of lengths] float32 on the CPU, in
        nats; 0 where response_mask is 0."""
        specs = [spec for update in schedule.global_batches for spec in update.micro_batches]
        packed = torch.zeros(batch.num_tokens, dtype=torch.float32, device=self.device)

        def keep(scores: TokenScores, inputs: ModelInputs) -> None:
            packed[inputs.packed_index] = scores.logprobs

        with self._megatron(), self._weights_in_use():
            self._model.eval()
            self._pipeline.forward(batch, schedule, specs, keep)
            self._model.train()
            self._send_from_last_stage(packed)
        return packed.cpu()

    def at_temperature_one(self) -> AbstractContextManager[None]:
        """Have ``logprobs`` score at temperature 1 within the block."""
        return at_temperature_one(self._model, self._temperature)

    def reference_logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Score the batch as ``logprobs`` does, under the weights that the run started from, which are put
        into the model meanwhile.

        Raises RuntimeError when the loss has no KL term, since then no reference is kept.
        """
        with self._weights_in_use(), reference_in_place(self._reference):
            return self.logprobs(batch, schedule)

    # Training

    def train(
        self, batch: PolicyBatch, schedule: Schedule, watch: UpdateWatch | None = None
    ) -> dict[str, Metric]:
        """Make one optimizer update per global batch of the schedule; return this replica's part of the
        metrics. ``watch`` sees weights and optimizer before and after, and every loss on the ranks that
        compute it."""
        metrics = TrainMetrics(self.device, self.coordinates.layout.dp, own_means(self.loss))
        with self._megatron(), self._weights_in_use():
            with self._optimizer_on_device():
                if watch is not None:
                    watch.begin(self._internals())
                for update in schedule.global_batches:
                    self._update(batch, schedule, update, metrics, watch)
                if watch is not None:
                    watch.end(self._internals())
            for tensor in metrics.tensors:
                self._send_from_last_stage(tensor)
        return metrics.result()

    def _update(
        self,
        batch: PolicyBatch,
        schedule: Schedule,
        update: GlobalBatch,
        metrics: TrainMetrics,
        watch: UpdateWatch | None,
    ) -> None:
        """Make one optimizer update, on one global batch, and record it in ``metrics``."""
        objective = update_objective(self.loss, batch, update, metrics, watch)
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._pipeline.forward_backward(batch, schedule, update.micro_batches, objective)
        self.num_updates += 1
        rate = learning_rate(self.num_updates, self.cfg.optimizer.lr, self.cfg.scheduler)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        _, grad_norm, _ = self._optimizer.step()
        metrics.add_update(grad_norm=grad_norm, learning_rate=rate)

    @contextlib.contextmanager
    def _optimizer_on_device(self) -> Iterator[None]:
        """Have optimizer state and gradients on the device within the block. With
        policy.offload_optimizer_for_logprob they leave it after the block."""
        if not self.cfg.offload_optimizer_for_logprob:
            yield
            return
        self._optimizer.restore_from_cpu()
        self._ddp.restore_grad_buffers()
        try:
            yield
        finally:
            self._offload_optimizer()

    def _offload_optimizer(self) -> None:
        self._optimizer.offload_to_cpu()
        self._ddp.offload_grad_buffers()

    def reference_weights(self) -> Sequence[Tensor]:
        """Return this rank's part of the reference's weights on the host; none where no copy is kept."""
        return () if self._reference is None else self._reference.held

    def _internals(self) -> Internals:
        """Return what this rank holds of weights and optimizer, which must be in use."""
        adam = adam_state(self._optimizer)
        return Internals(
            weights=[*self._model.parameters()],
            first_moments=adam.first_moments,
            num_updates=self.num_updates,
            optimizer_steps=adam.steps,
            learning_rate=max(group["lr"] for group in self._optimizer.param_groups),
        )

    # Weights

    def weight_metadata(self) -> list[TensorSpec]:
        """Describe what ``stage_weights`` will yield, in its order, without communication."""
        dtype = str(self._dtype).removeprefix("torch.")
        specs = []
        for name, parameter in self._sent_parameters():
            for rule in rules_of_all_ranks(name, self._part):
                shape = full_shape(rule, parameter.shape, self._part.tp_size)
                parts = split(rule, torch.empty(shape, device="meta"), self._geometry)
                specs += [
                    TensorSpec(hf_name, dtype, tuple(part.shape))
                    for hf_name, part in zip(rule.hf_names, parts, strict=True)
                ]
        return specs

    def stage_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) for every tensor of this pipeline stage.

        Collective over the ranks that gather weights; only the weight sender is sure to get every tensor.
        """
        with self._weights_in_use():
            yield from hf_tensors(self._sent_parameters(), self._geometry, self._part, self._gather)

    def export_hf(self, path: Path) -> None:
        """Write a checkpoint directory that transformers loads; every rank that gathers weights calls it."""
        tensors = self.stage_weights()
        if not is_weight_sender(self.coordinates):
            for _ in tensors:  # this rank takes part in the gathering
                pass
            return
        mine = write_weights(path, self.coordinates.pp, tensors)
        group = parallel_state.get_pipeline_model_parallel_group()
        written = [mine] * group.size()
        dist.all_gather_object(written, mine, group=group)
        if self.coordinates.is_leader:
            complete_checkpoint(path, self._source, written, self._dtype)
        dist.barrier(group=group)

    def save_checkpoint(self, path: Path, writer: CheckpointWriter) -> None:
        """Hand weights, optimizer and update count to ``writer``, which writes them into the empty directory
        ``path``; every rank calls it."""
        with self._megatron(), self._weights_in_use():
            counters = {"num_updates": self.num_updates}
            save_checkpoint(path, self._model, self._optimizer, counters, writer)

    def load_checkpoint(self, path: Path) -> None:
        """Continue from what ``save_checkpoint`` wrote, whatever layout wrote it; every rank calls it."""
        with self._megatron(), self._weights_in_use():
            self.num_updates = load_checkpoint(path, self._model, self._optimizer)["num_updates"]

    def random_states(self) -> Mapping[str, Tensor]:
        """Return the states of the generators from which Megatron-core draws dropout, by their names."""
        states: dict[str, Tensor] = tensor_parallel.get_cuda_rng_tracker().get_states()
        return states

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        """Have Megatron-core draw on from ``states``; none leaves its generators as they are."""
        if states:
            tensor_parallel.get_cuda_rng_tracker().set_states(dict(states))

    def _sent_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this stage's parameters by name, each expert's by itself, except a tied output layer, which
        is the first stage's embedding."""
        for name, parameter in single_experts(self._model.named_parameters()):
            if not self._is_tied_output(name):
                yield name, parameter

    def _is_tied_output(self, name: str) -> bool:
        return name == "output_layer.weight" and self._model_info.has_tied_embeddings

    def _gather(self, rule: Rule, part: Tensor) -> list[Tensor]:
        """Gather every rank's part of a parameter, if this rank is in a group with its stage's sender; return
        nothing if it is not."""
        layout, place = self.coordinates.layout, self.coordinates.rank % self.coordinates.layout.stage_size
        if rule.is_expert:
            size, group = layout.ep, parallel_state.get_expert_model_parallel_group()
        else:
            size, group = layout.tp, parallel_state.get_tensor_model_parallel_group()
        if place >= size:
            return []
        if size == 1 or (rule.cut is Cut.replicated and not rule.is_expert):
            return [part] * size
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return parts

    def _load_weights(self) -> None:
        # With tied embeddings, a last stage that is not the first holds the embedding as its output layer.
        parameters = (
            ("embedding.word_embeddings.weight" if self._is_tied_output(name) else name, parameter)
            for name, parameter in self._model.named_parameters()
        )
        load_weights(parameters, HFCheckpoint(self._source), self._geometry, self._part)

    # Running

    def _megatron(self) -> AbstractContextManager[None]:
        """Return the context in which Megatron-core runs: its code asks for "cuda", which must mean the CPU
        when the policy's device is the CPU."""
        return cuda_means_cpu() if self.device.type == "cpu" else contextlib.nullcontext()

    def _send_from_last_stage(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` on every pipeline stage with the last stage's values."""
        if self.coordinates.layout.pp > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(tensor, src=source, group=parallel_state.get_pipeline_model_parallel_group())


def _model_part(coordinates: Coordinates, model: ModelInfo) -> ModelPart:
    """Return the part of the model at these coordinates; every pipeline stage has equally many layers."""
    layout = coordinates.layout
    return ModelPart(
        first_layer=coordinates.pp * (model.num_layers // layout.pp),
        tp_rank=coordinates.tp,
        tp_size=layout.tp,
        ep_rank=coordinates.ep,
        ep_size=layout.ep,
        num_local_experts=(model.num_experts or 0) // layout.ep,
    )


def _initialise_parallel_state(coordinates: Coordinates) -> None:
    """Make Megatron-core's process groups, unless this process has them, and raise ValueError when they put
    this rank at other coordinates than those by which the driver dispatches."""
    layout = coordinates.layout
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    place = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    expected = (coordinates.tp, coordinates.cp, coordinates.dp, coordinates.pp, coordinates.ep)
    if place != expected:
        raise ValueError(f"rank {dist.get_rank()} is at (tp, cp, dp, pp, ep)={place}, not at {expected}")
