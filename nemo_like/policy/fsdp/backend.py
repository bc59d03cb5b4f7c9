"""The FSDP2 training backend: causal language models of transformers, also with a vision tower, with their
parameters spread over ranks.

    data-parallel axis     fully_shard: every rank holds a part, and a layer is gathered while it computes
    context-parallel axis  likewise; these ranks also share the tokens of each row
    tensor-parallel axis   DTensor, by the model's own plan
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nemo_like.batch.meta import MicroBatch, Schedule
from nemo_like.checkpoint.options import ResumeParts
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.models.model_info import placeholder_ids
from nemo_like.observability.metrics import Metric
from nemo_like.policy.backends.adapters import (
    ADAPTER_DIRECTORY,
    ADAPTER_DTYPE,
    adapter_config,
    write_adapters,
)
from nemo_like.policy.backends.devices import DTYPES, compute_device
from nemo_like.policy.backends.hf_checkpoint import value_head
from nemo_like.policy.backends.hf_export import complete_checkpoint, write_weights
from nemo_like.policy.backends.kept_weights import KeptWeights
from nemo_like.policy.backends.loss_scaling import loss_scaler
from nemo_like.policy.backends.parking import HostParking, stays_on_device
from nemo_like.policy.backends.scoring_backend import scoring_entropy
from nemo_like.policy.backends.updating_backend import UpdatingBackend
from nemo_like.policy.batch.context_parts import ContextRank
from nemo_like.policy.batch.policy_batch import PolicyBatch, empty_outputs, keep_outputs
from nemo_like.policy.fsdp.checkpoint import (
    checkpoint_state,
    load_checkpoint,
    load_reference,
    load_stored_weights,
    reference_state,
)
from nemo_like.policy.fsdp.image_text import (
    check_takes_features,
    freeze_vision_tower,
    image_rope_index,
    load_model,
    reads_images,
)
from nemo_like.policy.fsdp.layer_matrices import layer_matrices
from nemo_like.policy.fsdp.lora import Adapters, add_adapters, checkpoint_name, initial_values
from nemo_like.policy.fsdp.model import (
    DATA_AXIS,
    TENSOR_AXIS,
    ScoringCausalLM,
    empty_model,
    give_value_head,
    materialise,
    reduce_gradients,
    set_dtypes,
    shard,
)
from nemo_like.policy.fsdp.optimizer import ShardedOptimizer, is_whole_over_tensor_ranks
from nemo_like.policy.fsdp.tensor_parallel import TensorParallelModel, parallelize
from nemo_like.policy.fsdp.weights import fill, full_tensor, hf_tensors, logit_scale, stored_buffers
from nemo_like.policy.groups.layout import adapters_of, uses_muon
from nemo_like.policy.groups.parallelism import FIRST_REPLICA
from nemo_like.policy.loss.objective import LossFunction, Objective
from nemo_like.policy.loss.update_watch import BackendState, WeightCopies
from nemo_like.policy.loss.updated_tensors import UpdatedTensor
from nemo_like.policy.options import TrainedGroupConfig, WorkerGroupConfig
from nemo_like.policy.workers.checkpoint_writer import CheckpointWriter
from nemo_like.weight_transport.buckets import TensorSpec


class FSDPBackend(UpdatingBackend):
    """One rank's part of a worker group's model. torch.distributed must be initialised, with the coordinates'
    rank.

    Raises ValueError for a model that the layout or the log-prob computation cannot handle, and the errors of
    loading the checkpoint.
    """

    _model: ScoringCausalLM
    _adapters: Adapters

    def __init__(self, cfg: WorkerGroupConfig, objective: Objective, coordinates: Coordinates) -> None:
        self.cfg, self.objective, self.coordinates = cfg, objective, coordinates
        self.device = compute_device(cfg.device)
        self._dtype = DTYPES[cfg.precision]
        self._source = Path(cfg.model_name)
        layout = coordinates.layout
        self._mesh = init_device_mesh(
            self.device.type, (layout.dp * layout.cp, layout.tp), mesh_dim_names=(DATA_AXIS, TENSOR_AXIS)
        )
        self._context = ContextRank(coordinates.cp, layout.cp)
        self._causal_lm = empty_model(self._source, cfg.fsdp_cfg.model_kwargs)
        self._reads_images = reads_images(self._causal_lm.config)
        if self._reads_images:
            check_takes_features(self._causal_lm)
        if isinstance(cfg, TrainedGroupConfig) and cfg.freeze_vision_tower:
            freeze_vision_tower(self._causal_lm)
        if objective.scoring is None:
            give_value_head(self._causal_lm)
        self._adapters = self._add_adapters()
        if not isinstance(cfg, TrainedGroupConfig):
            self._causal_lm.requires_grad_(False)
        set_dtypes(self._causal_lm, self._dtype)
        spread = self._parallelize()
        group = self._mesh.get_group(TENSOR_AXIS) if spread.has_vocabulary_shards else None
        scoring = objective.scoring
        if scoring is not None and self._reads_images:
            forbidden_ids = placeholder_ids(self._causal_lm.config.to_dict())
            scoring = replace(scoring, forbidden_ids=forbidden_ids)
        self._model = ScoringCausalLM(self._causal_lm, scoring, group, self._context_group())
        shard(self._model, self._mesh, cfg, self._dtype)
        materialise(self._model, self.device, cfg.fsdp_cfg)
        # While a layer computes, FSDP has gathered parameters in place of these sharded ones, which live on.
        self._parameters: dict[str, DTensor] = dict(self._causal_lm.named_parameters())
        self._trained = {name: value for name, value in self._parameters.items() if value.requires_grad}
        self._buffers = stored_buffers(self._causal_lm)
        self._kept = {}
        for model in objective.further_models:
            self._load_weights(Path(model))
            self._kept[model] = KeptWeights(self._loaded_parts, cfg.reference_placement)
        scale = self._load_weights(self._source)
        if objective.scoring is not None:
            self._model.scale_logits(scale)
        keeps_copy = objective.keeps_reference and not self._adapters
        self._reference = KeptWeights(self._local_parts, cfg.reference_placement) if keeps_copy else None
        leaves = cfg.offload_parameters_between_phases
        self._weights_in_use = HostParking(self._local_parts()).in_use if leaves else stays_on_device
        if isinstance(cfg, TrainedGroupConfig):
            self._prepare_training(cfg, spread.partial_gradients)
        # Adapter dropout must be alike on tensor-parallel ranks, whose inputs are alike.
        torch.manual_seed(coordinates.dp * layout.cp + coordinates.cp)

    def _prepare_training(self, cfg: TrainedGroupConfig, partial_gradients: frozenset[str]) -> None:
        """Build the optimizer of the trained parameters; ``partial_gradients`` is explained in
        ``TensorParallelModel``."""
        self._training, self._scaler = cfg, loss_scaler(cfg)
        self._optimizer = ShardedOptimizer(
            self._trained,
            cfg,
            self.device,
            matrices=layer_matrices(self._causal_lm, self._trained, cfg.label) if uses_muon(cfg) else {},
            partial_gradients=partial_gradients,
            tensor_group=self._mesh.get_group(TENSOR_AXIS),
        )
        leaves = cfg.offload_optimizer_for_logprob
        self._moments_in_use = HostParking(self._moments()).in_use if leaves else stays_on_device

    # Log-probs and values

    @torch.no_grad()
    def _token_outputs(
        self, batch: PolicyBatch, schedule: Schedule, *, with_entropy: bool = False
    ) -> list[Tensor]:
        self._place_images(batch)
        scoring = self.objective.scoring and replace(self.objective.scoring, with_entropy=with_entropy)
        packed = empty_outputs(scoring, batch.num_outputs(schedule), self.device)
        with self._weights_in_use(), scoring_entropy(self._model, is_wanted=with_entropy):
            self._model.eval()
            for update in schedule.global_batches:
                for spec in update.micro_batches:
                    inputs = batch.micro_batch(spec, schedule, self._context)
                    keep_outputs(packed, self._model.scores(inputs).tensors, inputs)
            self._model.train()
            # FSDP keeps the last unit gathered for a backward pass, but none follows here.
            self._model.reshard()
        return [tensor.cpu() for tensor in packed]

    def routing_metrics(self) -> dict[str, Metric]:
        """Return nothing: this backend's routers do not replay the engines' choices."""
        return {}

    # Training

    def _gradients_in_use(self) -> AbstractContextManager[None]:
        return self._weights_in_use()

    def _optimizer_in_use(self) -> AbstractContextManager[None]:
        return self._moments_in_use()

    def _compute_gradients(
        self, batch: PolicyBatch, schedule: Schedule, specs: Sequence[MicroBatch], loss: LossFunction
    ) -> None:
        self._place_images(batch)
        for spec in specs:
            reduce_gradients(
                self._model, spec is specs[-1] or not self._training.fsdp_cfg.reduce_gradients_once
            )
            inputs = batch.micro_batch(spec, schedule, self._context)
            loss(self._model.scores(inputs), inputs).backward()

    # An update frees its gradients, so new gradients add up with accumulated ones only.
    _accumulate_gradients = _compute_gradients

    def _normalise_gradients(self, share: float) -> None:
        self._optimizer.scale_gradients(share)

    def _gradients(self) -> list[Tensor]:
        return list(self._optimizer.gradients().values())

    def _clear_gradients(self) -> None:
        self._optimizer.drop_gradients()

    def _step(self, rate: float) -> float:
        return self._optimizer.step(rate)

    def _backend_state(self) -> BackendState:
        return BackendState(
            weights=self._local_parts(),
            first_moments=self._optimizer.first_moments(),
            momenta=self._optimizer.momenta(),
            num_updates=self.num_updates,
            optimizer_steps=[steps - self.updates_before for steps in self._optimizer.step_counts()],
            learning_rates=self._optimizer.of_groups("lr"),
            weight_decays=self._optimizer.of_groups("weight_decay"),
            updated=self._updated_tensors(),
            copies=[self._copies()],
        )

    def _updated_tensors(self) -> list[UpdatedTensor]:
        return [*self._optimizer.updated_tensors()]

    def _first_layer(self) -> torch.nn.Module:
        layer: torch.nn.Module = self._causal_lm.get_input_embeddings()
        return layer

    def _named_parameters(self) -> list[tuple[str, Tensor]]:
        return [(name, part.detach().to_local()) for name, part in self._parameters.items()]

    def _copies(self) -> WeightCopies:
        """Return the weights that tensor parallelism does not cut, of which its ranks have copies."""
        whole = {name for name, value in self._parameters.items() if is_whole_over_tensor_ranks(value)}
        weights = [(name, part) for name, part in self._named_parameters() if name in whole]
        return WeightCopies(self.coordinates.rank - self.coordinates.tp, weights, are_computed_apart=True)

    # Weights

    def weight_metadata(self) -> list[TensorSpec]:
        """Describe the tensors that ``stage_weights`` will yield, in its order, without communication."""
        specs = []
        for name, plain_name in self._sent_tensors():
            if name in self._buffers:  # in its own precision: a rounded bias would choose other experts
                empty = torch.empty_like(self._buffers[name], device="meta")
            else:
                empty = torch.empty(self._parameters[name].shape, dtype=self._dtype, device="meta")
            specs += [
                TensorSpec(hf_name, str(part.dtype).removeprefix("torch."), tuple(part.shape))
                for hf_name, part in hf_tensors(self._causal_lm, plain_name, empty)
            ]
        return specs

    @torch.no_grad()
    def stage_weights(self, replicas: Sequence[int] = FIRST_REPLICA) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) for every tensor of the model, with the adapters merged.

        Collective over all ranks; one parameter is gathered at a time.
        """
        with self._weights_in_use():
            for name, plain_name in self._sent_tensors():
                yield from hf_tensors(self._causal_lm, plain_name, self._merged(name))

    def adapter_config(self) -> Mapping[str, Any] | None:
        """Return the contents of peft's adapter_config.json, as plain JSON values; None when the whole model
        trains."""
        config = self._adapters.config
        return None if config is None else adapter_config(config, self._source)

    def adapter_metadata(self) -> list[TensorSpec]:
        """Describe the tensors that ``stage_adapters`` will yield, in its order, without communication;
        return an empty list when the whole model trains."""
        dtype = str(ADAPTER_DTYPE).removeprefix("torch.")
        return [
            TensorSpec(saved_name, dtype, tuple(self._parameters[name].shape))
            for name, saved_name in self._adapters.parameter_names()
        ]

    @torch.no_grad()
    def stage_adapters(self, replicas: Sequence[int] = FIRST_REPLICA) -> Iterator[tuple[str, Tensor]]:
        """Yield (name as peft saves it, full tensor in float32) for every adapter, A [rank, inputs] and B
        [outputs, rank].

        Collective over all ranks; one parameter is gathered at a time.
        """
        with self._weights_in_use():
            for name, saved_name in self._adapters.parameter_names():
                yield saved_name, full_tensor(self._parameters[name], self.device, ADAPTER_DTYPE)

    def export_hf(self, path: Path) -> None:
        """Write a checkpoint directory that transformers loads, and inside it a directory with the adapters
        for peft, if there are any; every rank calls it."""
        tensors = self.stage_weights()
        if self.coordinates.rank == 0:
            written = write_weights(path, 0, tensors)
            complete_checkpoint(path, self._source, [written], self._dtype)
        else:
            for _ in tensors:  # this rank takes part in the gathering
                pass
        if config := self.adapter_config():
            adapters = {name: part.to("cpu", copy=True) for name, part in self.stage_adapters()}
            if self.coordinates.rank == 0:
                write_adapters(path / ADAPTER_DIRECTORY, config, adapters)
        dist.barrier()

    def save_checkpoint(self, path: Path, writer: CheckpointWriter) -> None:
        """Give the trained weights, the optimizer and the update count to ``writer``, which writes them into
        the empty directory ``path``; every rank calls it."""
        with self._weights_in_use(), self._moments_in_use():
            state = checkpoint_state(self._trained, self._optimizer, self._counters(), writer)
            if self._reference is not None and self._reference_is_new:
                state |= reference_state(self._parameters, self._reference, writer)
            writer.write(state, path)

    def load_checkpoint(self, path: Path, parts: ResumeParts = ResumeParts.all) -> None:
        """Take these parts of a checkpoint of ``save_checkpoint``, which any layout may have written, and
        forget accumulated gradients; every rank calls it."""
        self.drop_accumulated()
        with self._weights_in_use(), self._moments_in_use():
            if parts is ResumeParts.weights:
                load_stored_weights(path, self._trained)
                return
            if self._reference is not None and parts is ResumeParts.all:
                is_stored = load_reference(path, self._parameters, self._reference)
                self._reference_has_come(is_stored)
            counters = load_checkpoint(path, self._trained, self._optimizer, self._counters(), self.cfg.label)
            self._restore_counters(counters, parts)

    def random_states(self) -> Mapping[str, Tensor]:
        """Return nothing: adapter dropout draws from torch's own generators."""
        return {}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        """Do nothing: there are no generators besides torch's."""

    def _sent_tensors(self) -> Iterator[tuple[str, str]]:
        """Yield (name here, name in a model without adapters) for every parameter except the adapters' own,
        and for every buffer that a checkpoint has."""
        for name in (*self._parameters, *self._buffers):
            plain_name = checkpoint_name(name)
            if plain_name is not None:
                yield name, plain_name

    def _merged(self, name: str) -> Tensor:
        """Gather a full parameter and merge its adapter, if it has one, into it; collective over all ranks.
        Every rank has a buffer whole."""
        if name in self._buffers:
            return self._buffers[name]
        if not self._adapters:
            return full_tensor(self._parameters[name], self.device, self._dtype)

        def full(other: str) -> Tensor:
            return full_tensor(self._parameters[other], self.device, torch.float32)

        return self._adapters.merged(name, full(name), full).to(self._dtype)

    def _add_adapters(self) -> Adapters:
        lora = adapters_of(self.cfg)
        if lora is None:
            return Adapters({})
        adapters = add_adapters(self._causal_lm, self.cfg.label, lora)
        if self.objective.scoring is None:  # a critic's output layer is new
            self._causal_lm.get_output_embeddings().requires_grad_(True)
        return adapters

    def _context_group(self) -> dist.ProcessGroup | None:
        """Make the group of the ranks that share rows with this one; return None where it has whole rows."""
        layout = self.coordinates.layout
        if layout.cp == 1:
            return None
        sizes = (layout.dp, layout.cp, layout.tp)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=("dp", "cp", "tp")).get_group("cp")

    def _parallelize(self) -> TensorParallelModel:
        if self.coordinates.layout.tp == 1:
            return TensorParallelModel(has_vocabulary_shards=False, partial_gradients=frozenset())
        return parallelize(self._causal_lm, self._mesh[TENSOR_AXIS], self.cfg.label)

    def _load_weights(self, path: Path) -> float:
        """Load a checkpoint on the first rank's host and send it to all ranks, one tensor at a time. Return
        the factor of the model's logits; 1 for a critic."""
        source: dict[str, Tensor] = {}
        scale = torch.ones(1, device=self.device)
        if self.coordinates.rank == 0:
            model, lora = load_model(path), adapters_of(self.cfg)
            source = initial_values(self._parameters, None if lora is None else lora.adapter_path)
            if self.objective.scoring is not None:
                scale.fill_(logit_scale(model, self.cfg.label))
            else:
                hidden_size = model.get_input_embeddings().weight.shape[1]
                source[give_value_head(model)] = value_head(path, hidden_size)
            source = {**dict(model.named_parameters()), **stored_buffers(model), **source}
        dist.broadcast(scale, src=0)
        tensors = {**self._parameters, **self._buffers}
        named = {checkpoint_name(name) or name: value for name, value in tensors.items()}
        fill(named, source, self.device)
        return float(scale)

    def _place_images(self, batch: PolicyBatch) -> None:
        if self._reads_images:
            batch.place_images(image_rope_index(self._causal_lm))

    def _local_parts(self) -> list[Tensor]:
        return [part.to_local() for part in self._parameters.values()]

    def _loaded_parts(self) -> list[Tensor]:
        """Return this rank's part of all that a checkpoint has."""
        return [*self._local_parts(), *self._buffers.values()]

    def _moments(self) -> list[Tensor]:
        """Return this rank's parts of the optimizer's moments. Gradients are not among them, since each
        update frees its own."""
        return [moment.to_local() for moment in self._optimizer.moments().values()]
