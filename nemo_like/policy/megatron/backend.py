"""The Megatron-core training backend: log-probs, optimizer updates and weights of a sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_like.algorithms.critic import TokenValues
from nemo_like.algorithms.logprobs import TokenScores
from nemo_like.batch.meta import MicroBatch, Schedule
from nemo_like.checkpoint.options import ResumeParts
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.compat.cpu_shim import cuda_means_cpu
from nemo_like.compat.foreach import use_torch_kernels
from nemo_like.models.adapter_layers import adapted_experts, adapted_layers
from nemo_like.models.model_info import read_model_info
from nemo_like.models.weight_names import OUTPUT_LAYER, Cut, Rule
from nemo_like.observability.metrics import Metric
from nemo_like.policy.backends.adapters import (
    ADAPTER_DIRECTORY,
    ADAPTER_DTYPE,
    adapter_config,
    peft_config,
    write_adapters,
)
from nemo_like.policy.backends.devices import DTYPES, compute_device
from nemo_like.policy.backends.hf_checkpoint import HFCheckpoint, value_head
from nemo_like.policy.backends.hf_export import complete_checkpoint, stacked_experts, write_weights
from nemo_like.policy.backends.interface import is_weight_sender
from nemo_like.policy.backends.kept_weights import KeptWeights
from nemo_like.policy.backends.loss_scaling import loss_scaler
from nemo_like.policy.backends.parking import HostParking, stays_on_device
from nemo_like.policy.backends.scoring_backend import scoring_entropy
from nemo_like.policy.backends.updating_backend import UpdatingBackend
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch, empty_outputs, keep_outputs
from nemo_like.policy.groups.layout import (
    adapters_of,
    length_multiple,
    num_chunks,
    recomputes_layers,
    replays_routes,
    updates_on_host,
    uses_muon,
)
from nemo_like.policy.groups.parallelism import FIRST_REPLICA, is_beside_sender, shards_optimizer
from nemo_like.policy.loss.objective import LossFunction, Objective
from nemo_like.policy.loss.train_metrics import TrainMetrics
from nemo_like.policy.loss.update_watch import BackendState
from nemo_like.policy.loss.updated_tensors import UpdatedTensor
from nemo_like.policy.megatron.adapter_parts import AdapterSettings
from nemo_like.policy.megatron.checkpoint import (
    load_checkpoint,
    load_reference,
    load_stored_weights,
    save_checkpoint,
)
from nemo_like.policy.megatron.expert_load import ExpertLoad, freeze_routers
from nemo_like.policy.megatron.lora import MegatronAdapters, add_adapters
from nemo_like.policy.megatron.matrix_updates import layer_matrices
from nemo_like.policy.megatron.model import ScoringGPTModel, transformer_config
from nemo_like.policy.megatron.model_chunks import ModelChunks, without_sync
from nemo_like.policy.megatron.optimizer import (
    build_optimizer,
    configure_groups,
    ensure_state,
    optimizer_state,
    tensors_beside_model,
)
from nemo_like.policy.megatron.optimizer_tensors import updated_tensors, weight_copies
from nemo_like.policy.megatron.parallel_groups import initialise_parallel_state
from nemo_like.policy.megatron.pipeline import Pipeline
from nemo_like.policy.megatron.router_replay import RouteReplay
from nemo_like.policy.megatron.weight_conversion import (
    Geometry,
    ModelPart,
    full_shape,
    hf_tensors,
    load_weights,
    router_biases,
    rules_of_all_ranks,
    single_experts,
    split,
)
from nemo_like.policy.options import TrainedGroupConfig, WorkerGroupConfig
from nemo_like.policy.workers.checkpoint_writer import CheckpointWriter
from nemo_like.weight_transport.buckets import TensorSpec


class MegatronBackend(UpdatingBackend):
    """One rank's part of a worker group's model. torch.distributed must be initialised, with the coordinates'
    rank.

    Raises ValueError when the coordinates are not this rank's, and the errors of loading the checkpoint.
    """

    _model: ModelChunks
    _adapters: MegatronAdapters

    def __init__(self, cfg: WorkerGroupConfig, objective: Objective, coordinates: Coordinates) -> None:
        self.cfg, self.objective, self.coordinates = cfg, objective, coordinates
        self.device = compute_device(cfg.device)
        self._parking: HostParking | None = None  # parks the optimizer's state, if it leaves the device
        self._dtype = DTYPES[cfg.precision]
        self._source = Path(cfg.model_name)
        self._model_info = read_model_info(cfg.model_name, cfg.backend)
        if objective.scoring is None:
            self._model_info = replace(self._model_info, has_tied_embeddings=False)
        self._geometry = Geometry.of(self._model_info, coordinates.layout.tp)
        use_torch_kernels()
        with self._megatron():
            initialise_parallel_state(coordinates)
            config = transformer_config(self._model_info, cfg, coordinates.layout)
            self._part = ModelPart.of(coordinates, self._model_info)
            self._model = self._chunks(config)
            self._model.to(self.device)
            self._expert_load = ExpertLoad(
                self._model, self._model_info, self.device, recomputes=recomputes_layers(cfg)
            )
            self._weights = dict(self._model.named_tensors())  # without the adapters
            self._kept = {}
            for model in objective.further_models:
                self._load_weights(Path(model))
                self._kept[model] = KeptWeights(self._kept_tensors, cfg.reference_placement)
            self._load_weights(self._source)
            self._adapters = self._add_adapters(config)
            keeps_copy = objective.keeps_reference and not self._adapters
            self._reference = KeptWeights(self._kept_tensors, cfg.reference_placement) if keeps_copy else None
            if isinstance(cfg, TrainedGroupConfig):
                self._prepare_training(cfg, config)
            else:
                self._model.requires_grad_(False)
            self._replay = RouteReplay(self._model if replays_routes(cfg) else None, config, self.device)
            chunks = self._ddps if isinstance(cfg, TrainedGroupConfig) else [*self._model]
            self._pipeline = Pipeline(chunks, config, length_multiple(cfg), self._replay)
        leaves = cfg.offload_parameters_between_phases
        self._weights_in_use = HostParking(self._model.parameters()).in_use if leaves else stays_on_device

    def _chunks(self, config: TransformerConfig) -> ModelChunks:
        count = num_chunks(self.cfg)
        return ModelChunks(
            [
                ScoringGPTModel(
                    config,
                    self._model_info,
                    self.objective.scoring,
                    self._part,
                    chunk,
                    has_adapters=adapters_of(self.cfg) is not None,
                )
                for chunk in (range(count) if count > 1 else (None,))
            ]
        )

    def _prepare_training(self, cfg: TrainedGroupConfig, config: TransformerConfig) -> None:
        """Wrap the model so that gradients are summed over ranks, and build the optimizer."""
        self._training, self._scaler = cfg, loss_scaler(cfg)
        layout = self.coordinates.layout
        if cfg.megatron_cfg.freeze_moe_router:
            freeze_routers(self._model)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=layout.dp * layout.cp > 1,
            use_distributed_optimizer=shards_optimizer(cfg),
        )
        # What later chunks exchange waits for no other computing than the pipeline's, so it needs no buckets.
        self._ddps = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self._model)
        ]
        trained_dtype = ADAPTER_DTYPE if self._adapters else self._dtype
        matrices = layer_matrices(self._model, self._geometry, self._part) if uses_muon(cfg) else {}
        self._optimizer = build_optimizer(cfg, self._ddps, trained_dtype, matrices)
        config.no_sync_func = partial(without_sync, self._ddps)
        if cfg.offload_optimizer_for_logprob:
            self._offload_gradients()
            if not updates_on_host(cfg):
                self._park_optimizer()

    # Log-probs and values

    @torch.no_grad()
    def _token_outputs(
        self, batch: PolicyBatch, schedule: Schedule, *, with_entropy: bool = False
    ) -> list[Tensor]:
        specs = [spec for update in schedule.global_batches for spec in update.micro_batches]
        scoring = self.objective.scoring and replace(self.objective.scoring, with_entropy=with_entropy)
        packed = empty_outputs(scoring, batch.num_outputs(schedule), self.device)

        def keep(outputs: TokenScores | TokenValues, inputs: ModelInputs) -> None:
            keep_outputs(packed, outputs.tensors, inputs)

        with self._megatron(), self._weights_in_use(), self._replay.comparing():
            self._model.eval()
            with scoring_entropy(self._model, is_wanted=with_entropy):
                self._pipeline.forward(batch, schedule, specs, keep)
            self._model.train()
            for tensor in packed:
                self._send_from_last_stage(tensor)
        return [tensor.cpu() for tensor in packed]

    def reference_logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Score the batch with the reference's weights; routers do not replay the engines' choices."""
        with self._replay.suspended():
            return super().reference_logprobs(batch, schedule)

    def routing_metrics(self) -> dict[str, Metric]:
        """Return how far the routers' own choices are from those that they replayed, since the last call;
        every rank of a replica calls it."""
        return self._replay.metrics()

    # Training

    @contextlib.contextmanager
    def _gradients_in_use(self) -> Iterator[None]:
        with self._megatron(), self._weights_in_use():
            yield

    def _optimizer_in_use(self) -> AbstractContextManager[None]:
        return self._optimizer_on_device()

    def _begin_accumulation(self) -> None:
        if self._training.offload_optimizer_for_logprob:
            # Gradients stay on the device until they are used, even while the optimizer is on the host.
            self._restore_gradients()
        self._clear_gradients()

    def _compute_gradients(
        self, batch: PolicyBatch, schedule: Schedule, specs: Sequence[MicroBatch], loss: LossFunction
    ) -> None:
        self._clear_gradients()
        self._pipeline.forward_backward(batch, schedule, specs, loss)

    def _accumulate_gradients(
        self, batch: PolicyBatch, schedule: Schedule, specs: Sequence[MicroBatch], loss: LossFunction
    ) -> None:
        self._pipeline.accumulate(batch, schedule, specs, loss)

    def _normalise_gradients(self, share: float) -> None:
        self._pipeline.reduce_accumulated(share)

    def _drop_gradients(self) -> None:
        self._expert_load.forget()
        self._replay.forget()
        if self._training.offload_optimizer_for_logprob:
            with self._megatron():
                self._offload_gradients()

    def _gradients(self) -> list[Tensor]:
        return [part.grad_data for ddp in self._ddps for part in (*ddp.buffers, *ddp.expert_parallel_buffers)]

    def _step(self, rate: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        _, grad_norm, _ = self._optimizer.step()
        return grad_norm

    def _comparing_routers(self) -> AbstractContextManager[None]:
        return self._replay.comparing()

    def _result(self, metrics: TrainMetrics) -> dict[str, Metric]:
        with self._megatron():
            for tensor in metrics.tensors:
                self._send_from_last_stage(tensor)
            load = self._expert_load.result(self.coordinates.layout.dp)
        return metrics.result() | load | self.routing_metrics()

    def _clear_gradients(self) -> None:
        for ddp in self._ddps:
            ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _offload_gradients(self) -> None:
        for ddp in self._ddps:
            ddp.offload_grad_buffers()

    def _restore_gradients(self) -> None:
        for ddp in self._ddps:
            ddp.restore_grad_buffers()

    @contextlib.contextmanager
    def _optimizer_on_device(self) -> Iterator[None]:
        """Have optimizer state and gradients on the device within the block. With
        policy.offload_optimizer_for_logprob both leave it after the block."""
        if not self._training.offload_optimizer_for_logprob:
            yield
            return
        with self._optimizer_state_on_device():
            self._restore_gradients()
            try:
                yield
            finally:
                self._offload_gradients()

    def _optimizer_state_on_device(self) -> AbstractContextManager[None]:
        """Return a context that has the optimizer's state on the device, without gradients."""
        return self._parking.in_use() if self._parking is not None else stays_on_device()

    def _park_optimizer(self) -> None:
        """Keep the optimizer's state on the host from now on, except within
        ``_optimizer_state_on_device``."""
        ensure_state(self._optimizer)
        self._parking = HostParking(tensors_beside_model(self._optimizer, self._all_parameters()))

    def _backend_state(self) -> BackendState:
        state = optimizer_state(self._optimizer)
        return BackendState(
            weights=self._all_parameters(),
            first_moments=state.first_moments,
            momenta=state.momenta,
            num_updates=self.num_updates,
            optimizer_steps=[steps - self.updates_before for steps in state.steps],
            learning_rates=[group["lr"] for group in self._optimizer.param_groups],
            weight_decays=[group["weight_decay"] for group in self._optimizer.param_groups],
            updated=self._updated_tensors(),
            copies=weight_copies(self._named_parameters(), self.coordinates),
        )

    def _updated_tensors(self) -> list[UpdatedTensor]:
        return [*updated_tensors(self._optimizer, self._named_parameters())]

    def _first_layer(self) -> torch.nn.Module | None:
        return getattr(self._model[0], "embedding", None)

    def _named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [*self._model.named_parameters()]

    # Weights

    def weight_metadata(self) -> list[TensorSpec]:
        """Describe the tensors that ``stage_weights`` will yield, in its order, without communication."""
        specs = []
        for name, parameter in self._sent_parameters():
            dtype = str(parameter.dtype).removeprefix("torch.")
            for rule in rules_of_all_ranks(name, self._part):
                shape = full_shape(rule, parameter.shape, self._part.cut_of(rule)[1])
                parts = split(rule, torch.empty(shape, device="meta"), self._geometry)
                specs += [
                    TensorSpec(hf_name, dtype, tuple(part.shape))
                    for hf_name, part in zip(rule.hf_names, parts, strict=True)
                ]
        return specs

    @torch.no_grad()
    def stage_weights(self, replicas: Sequence[int] = FIRST_REPLICA) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) for every tensor of this pipeline stage, with the adapters
        merged.

        Collective over the ranks that gather weights; only the weight senders are sure to get every tensor.
        """
        with self._weights_in_use():
            merged = ((name, self._adapters.merged(name, weight)) for name, weight in self._sent_parameters())
            gather = partial(self._gather, replicas=replicas)
            yield from hf_tensors(merged, self._geometry, self._part, gather)

    def adapter_config(self) -> Mapping[str, Any] | None:
        """Return the contents of peft's adapter_config.json, as plain JSON values; None when the whole model
        trains."""
        lora = adapters_of(self.cfg)
        if lora is None:
            return None
        layers = list(adapted_layers(lora, self._model_info.num_experts))
        experts = () if self._model_info.num_experts is None else adapted_experts(lora)
        return adapter_config(peft_config(lora, layers, experts), self._source)

    def adapter_metadata(self) -> list[TensorSpec]:
        """Describe the tensors that ``stage_adapters`` will yield, in its order, without communication;
        return an empty list when the whole model trains."""
        dtype = str(ADAPTER_DTYPE).removeprefix("torch.")
        return [TensorSpec(part.name, dtype, part.full_shape) for part in self._adapters.parts()]

    def stage_adapters(self, replicas: Sequence[int] = FIRST_REPLICA) -> Iterator[tuple[str, Tensor]]:
        """Yield (name as peft saves it, full tensor in float32) for every adapter of this pipeline stage, A
        [rank, inputs] and B [outputs, rank].

        Collective over the ranks that gather weights; only the weight sender is sure to get every tensor.
        """
        with self._weights_in_use():
            for adapter in self._adapters.parts():
                if parts := self._gather(adapter.rule, adapter.parameter.detach(), replicas):
                    yield adapter.name, adapter.joined(parts)

    def export_hf(self, path: Path) -> None:
        """Write a checkpoint directory that transformers loads, and inside it a directory with the adapters
        for peft, if there are any; every rank that gathers weights calls it."""
        tensors, adapters = self.stage_weights(), self.stage_adapters()
        if not is_weight_sender(self.coordinates):
            for _ in chain(tensors, adapters):  # this rank takes part in the gathering
                pass
            return
        if self._model_info.family.stacks_experts:
            tensors = stacked_experts(tensors, self._model_info.num_experts or 0)
        mine = write_weights(path, self.coordinates.pp, tensors)
        group = parallel_state.get_pipeline_model_parallel_group()
        written = [mine] * group.size()
        dist.all_gather_object(written, mine, group=group)
        if self.coordinates.is_leader:
            complete_checkpoint(path, self._source, written, self._dtype)
        if config := self.adapter_config():
            self._export_adapters(path / ADAPTER_DIRECTORY, config, adapters)
        dist.barrier(group=group)

    def _export_adapters(
        self, path: Path, config: Mapping[str, Any], adapters: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Write the adapters of all pipeline stages into one file, as peft expects; every weight sender calls
        this."""
        mine = {name: adapter.to("cpu", copy=True) for name, adapter in adapters}
        group = parallel_state.get_pipeline_model_parallel_group()
        stages = [mine] * group.size() if self.coordinates.is_leader else None
        dist.gather_object(mine, stages, group=group, group_dst=0)
        if stages is not None:
            write_adapters(path, config, {name: part[name] for part in stages for name in part})

    def save_checkpoint(self, path: Path, writer: CheckpointWriter) -> None:
        """Give the trained weights, the optimizer and the update count to ``writer``, which writes them into
        the empty directory ``path``; every rank calls it."""
        with self._megatron(), self._weights_in_use(), self._optimizer_state_on_device():
            reference = self._reference if self._reference_is_new else None
            save_checkpoint(path, self._stored(), self._optimizer, self._counters(), writer, reference)

    def load_checkpoint(self, path: Path, parts: ResumeParts = ResumeParts.all) -> None:
        """Take these parts of a checkpoint of ``save_checkpoint``, which any layout may have written, and
        forget accumulated gradients; every rank calls it."""
        self.drop_accumulated()
        with self._megatron(), self._weights_in_use():
            was_parked = self._parking is not None
            if self._parking is not None:
                self._parking.end()
                self._parking = None  # freed before another is made, so that the host holds one copy
            try:
                if parts is ResumeParts.weights:
                    load_stored_weights(path, self._stored(), self._optimizer)
                    return
                if self._reference is not None and parts is ResumeParts.all:
                    self._reference_has_come(load_reference(path, self._stored(), self._reference))
                counters = load_checkpoint(path, self._stored(), self._optimizer, self.cfg.label)
                self._restore_counters(counters, parts)
                configure_groups(self._optimizer, self._training)
            finally:
                if was_parked:
                    self._park_optimizer()  # some of the state's tensors are new ones

    def _stored(self) -> torch.nn.Module:
        """Return the module whose parameters go into checkpoints: the adapters, with a critic's output layer,
        or the whole model."""
        return self._adapters if self._adapters else self._model

    def random_states(self) -> Mapping[str, Tensor]:
        """Return the states of the generators from which Megatron-core draws dropout, by their names."""
        states: dict[str, Tensor] = tensor_parallel.get_cuda_rng_tracker().get_states()
        return states

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        """Restore the generators from which Megatron-core draws dropout; an empty mapping changes nothing."""
        if states:
            tensor_parallel.get_cuda_rng_tracker().set_states(dict(states))

    def _sent_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this stage's parameters by name, with one entry per expert, and without a tied output layer,
        which is the first stage's embedding."""
        for name, parameter in single_experts(self._weights.items()):
            if not self._is_tied_output(name):
                yield name, parameter

    def _add_adapters(self, config: TransformerConfig) -> MegatronAdapters:
        lora = adapters_of(self.cfg)
        if lora is None:
            return MegatronAdapters({})
        settings = AdapterSettings(lora, self._geometry, self._part, config.sequence_parallel)
        # Adapter dropout must be alike on tensor-parallel ranks, whose inputs are alike.
        coordinates = self.coordinates
        torch.manual_seed(coordinates.rank // coordinates.layout.tp)
        return add_adapters(self._model, settings, self._model[-1].value_head)

    def _is_tied_output(self, name: str) -> bool:
        return name == OUTPUT_LAYER and self._model_info.has_tied_embeddings

    def _gather(self, rule: Rule, part: Tensor, replicas: Sequence[int]) -> list[Tensor]:
        """Gather all ranks' parts of a parameter if this rank is in a group with a weight sender of
        ``replicas``; else return an empty list."""
        layout = self.coordinates.layout
        if rule.is_expert:
            size = layout.expert_ranks
            group = parallel_state.get_expert_tensor_and_model_parallel_group()
        else:
            size, group = layout.tp, parallel_state.get_tensor_model_parallel_group()
        if not is_beside_sender(self.coordinates, size, replicas):
            return []
        if size == 1 or (rule.cut is Cut.replicated and not rule.is_expert):
            return [part] * size
        parts = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return parts

    def _all_parameters(self) -> list[Tensor]:
        return [*self._model.parameters()]

    def _kept_tensors(self) -> list[Tensor]:
        return [*self._all_parameters(), *(bias for _, bias in router_biases(self._model))]

    def _load_weights(self, path: Path) -> None:
        weights = dict(self._weights)
        if self.objective.scoring is None and (head := weights.pop(OUTPUT_LAYER, None)) is not None:
            with torch.no_grad():
                head.copy_(value_head(path, self._model_info.hidden_size))
        # With tied embeddings, a last stage that is not the first holds the embedding as its output layer.
        parameters = (
            ("embedding.word_embeddings.weight" if self._is_tied_output(name) else name, parameter)
            for name, parameter in weights.items()
        )
        load_weights(parameters, HFCheckpoint(path), self._geometry, self._part)

    # Helpers

    def _megatron(self) -> AbstractContextManager[None]:
        """Return the context in which Megatron-core runs: its code asks for "cuda", which must mean the CPU
        when the policy's device is the CPU."""
        return cuda_means_cpu() if self.device.type == "cpu" else contextlib.nullcontext()

    def _send_from_last_stage(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` on every pipeline stage with the last stage's values."""
        if self.coordinates.layout.pp > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(tensor, src=source, group=parallel_state.get_pipeline_model_parallel_group())
