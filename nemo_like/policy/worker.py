"""One policy worker: it fetches samples, computes with its part of the model, and writes back if it leads.

``PolicyWorker`` is a plain class, so that a test can call it without Ray. Its methods that take a ``meta``
get the shard of this data-parallel rank with its schedule; every rank of a replica gets the same shard. All
ranks compute; only the leader writes and returns results. Only the leader fetches, unless
policy.replica_fetch is every_rank.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from nemo_like.batch.columns import (
    INPUT_IDS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    RESPONSE_MASK,
    Column,
    Declaration,
)
from nemo_like.batch.meta import Chunk, KVBatchMeta, Schedule
from nemo_like.batch.sharding import shard_for_logprobs
from nemo_like.batch.tags import (
    GROUP_ID,
    MULT_PROB_ERROR,
    NUM_PROMPT_TOKENS,
    NUM_RESPONSE_TOKENS,
    SAMPLE_MASK,
    named,
)
from nemo_like.checkpoint.digests import differing_files, own_share
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.cluster.gloo import one_gloo_device
from nemo_like.cluster.imports import lasting_imports, load_target
from nemo_like.config.schema import (
    CheckpointWriting,
    Device,
    LoraSync,
    LossConfig,
    PolicyBackend,
    PolicyConfig,
    ReplicaFetch,
    Tripwires,
)
from nemo_like.data_plane.connection import connect
from nemo_like.data_plane.interface import DataPlane
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.observability.metrics import Metric
from nemo_like.observability.trace import span
from nemo_like.policy.batch import PolicyBatch
from nemo_like.policy.batch_keeper import BatchKeeper
from nemo_like.policy.checked_loss import LossFailed, own_reads
from nemo_like.policy.checkpoint_writer import CheckpointWriter, told_in_short
from nemo_like.policy.interface import (
    TrainingBackend,
    WeightSender,
    WeightSenderSpec,
    is_weight_sender,
)
from nemo_like.policy.mismatch import logprob_mismatch
from nemo_like.policy.parallelism import FIRST_REPLICA, gathers_weights, logprob_strategy
from nemo_like.policy.policy_columns import (
    model_reads,
    policy_declarations,
    scoring_reads,
    training_reads,
)
from nemo_like.policy.random_state import load_random_state, save_random_state
from nemo_like.policy.replica import Replica
from nemo_like.policy.results import WorkerScores, WorkerUpdate
from nemo_like.policy.reward_kl import reward_kl_tags
from nemo_like.policy.worker_watch import WorkerWatch
from nemo_like.weight_transport.buckets import SentAdapter


class PolicyWorker:
    """One policy worker. ``data_plane`` and ``weight_sender`` are objects, or descriptions from which
    ``setup`` makes them in this process."""

    def __init__(
        self,
        *,
        cfg: PolicyConfig,
        loss: LossConfig,
        coordinates: Coordinates,
        temperature: float,
        data_plane: DataPlane | DataPlaneSpec,
        weight_sender: WeightSender | WeightSenderSpec | None,
        master_addr: str,
        master_port: int,
        timeout_s: float,
        weight_replicas: Sequence[int] = FIRST_REPLICA,
        tripwires: Tripwires = Tripwires.off,
    ) -> None:
        """Keep the settings; ``setup`` loads the model and connects.

        ``temperature`` is the sampling temperature; ``timeout_s`` bounds every collective; the replicas
        ``weight_replicas`` send the weights to engines; ``tripwires`` says what is measured besides. Raises
        ValueError when the user's own loss cannot be found.
        """
        self.cfg, self.loss, self.coordinates = cfg, loss, coordinates
        self.policy_version = 0
        self._own_reads, self._model_reads = own_reads(loss), model_reads(cfg)
        self._is_updating = False
        self._temperature, self._tripwires = temperature, tripwires
        self._data_plane_source = data_plane
        self._weight_sender_source, self._weight_replicas = weight_sender, tuple(weight_replicas)
        lora_sync = (
            weight_sender.lora_sync if isinstance(weight_sender, WeightSenderSpec) else LoraSync.merged
        )
        self._sends_adapters = lora_sync is LoraSync.adapter
        self._init_method = f"tcp://{master_addr}:{master_port}"
        self._timeout_s = timeout_s

    def setup(self) -> None:
        """Join the other workers, load the model and connect to the data plane; return when this worker is
        ready."""
        with one_gloo_device():
            self._join()
        self._checkpoint: CheckpointWriter | None = None
        source = self._data_plane_source
        plane = None
        if self._fetches:
            plane = connect(source) if isinstance(source, DataPlaneSpec) else source
        self._batches = BatchKeeper(plane, self._replica, self.cfg.replica_fetch, self._backend.device)
        self._weight_sender: WeightSender | None = None
        if is_weight_sender(self.coordinates, self._weight_replicas):
            sender = self._weight_sender_source
            if isinstance(sender, WeightSenderSpec):
                sender = load_target(sender.target)(coordinates=self.coordinates, **sender.kwargs)
            self._weight_sender = sender

    def declarations(self) -> tuple[Declaration, ...]:
        """Return the columns that the policy and the loss write and read."""
        return policy_declarations(self.loss, self._own_reads, self._model_reads)

    def compute_logprobs(self, meta: KVBatchMeta, columns: Sequence[Column]) -> WorkerScores | None:
        """Compute log-probs of the shard's samples and start to write them, all columns in one write.

        prev_logprobs are those under the current weights, reference_logprobs those under the weights that the
        run started from. They are written in the background. The leader returns, with prev_logprobs, tag
        mult_prob_error and the mismatch metrics, and with reference_logprobs the sums of the KL as tags where
        the reward has one; the other ranks return None.
        """
        score = {
            PREV_LOGPROBS: self._backend.logprobs,
            REFERENCE_LOGPROBS: self._backend.reference_logprobs,
        }
        batch = self._batches.batch(meta, scoring_reads(columns, self.loss, self._model_reads))
        with span("compute"), _Stopwatch() as compute:
            logprobs = {column: score[column](batch, _schedule(meta)) for column in columns}
            routing = self._backend.routing_metrics()
        batch.add(logprobs)
        if self._watch is not None:
            self._watch.scored(logprobs, batch)
        if not self.coordinates.is_leader:
            return None
        self._batches.write(meta, logprobs)
        tags: dict[str, list[float]] = {}
        metrics = dict(routing)
        if PREV_LOGPROBS in logprobs:
            mismatch = logprob_mismatch(batch, logprobs[PREV_LOGPROBS])
            tags[MULT_PROB_ERROR.name] = mismatch.mult_prob_error
            metrics |= mismatch.metrics
        if REFERENCE_LOGPROBS in logprobs and self.loss.use_kl_in_reward:
            tags |= reward_kl_tags(batch, self.loss.reference_policy_kl_type)
        return WorkerScores(tags, metrics, compute.seconds)

    def train(self, meta: KVBatchMeta) -> WorkerUpdate | None:
        """Make the schedule's optimizer updates, and count the policy version up by one; needs tags advantage
        and sample_mask. The leader returns the result, the other ranks None.

        Raises DataPlaneError before any weight is changed, when samples cannot be fetched or when the
        background write of ``compute_logprobs`` failed, on this worker or on another.
        """
        batch = self._batches.batch(meta, training_reads(self.loss, self._own_reads, self._model_reads))
        watch, losses = self._watch, None
        if watch is not None:
            losses = watch.training(meta, batch)
        self._is_updating = True
        with span("compute"), _Stopwatch() as compute, _naming_samples(meta):
            metrics = self._backend.train(batch, _schedule(meta), losses)
        self.policy_version += 1
        self._is_updating = False
        measured: dict[str, Metric] = {}
        if watch is not None and losses is not None:
            measured = watch.trained(losses)
        operations = self._batches.finish(meta.partition)
        if not self.coordinates.is_leader:
            return None
        return WorkerUpdate(metrics, self.policy_version, compute.seconds, operations, measured)

    def canary_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probs of all tokens but the first, at temperature 1, nats; every rank calls it."""
        length = len(token_ids)
        meta = KVBatchMeta(
            "canary",
            (Chunk("canary", (length,)),),
            ((0, 0),),
            frozenset(),
            named(
                {
                    SAMPLE_MASK: (1,),
                    GROUP_ID: (0,),
                    NUM_PROMPT_TOKENS: (1,),
                    NUM_RESPONSE_TOKENS: (length - 1,),
                }
            ),
        )
        strategy = logprob_strategy(self.cfg)
        (shard,) = shard_for_logprobs(meta, num_shards=1, global_batch_size=1, strategy=strategy)
        mask = np.ones(length, np.uint8)
        mask[0] = 0
        columns = {INPUT_IDS.name: np.array(token_ids, np.int32), RESPONSE_MASK.name: mask}
        batch = PolicyBatch(columns, (length,), {}, self._backend.device)
        with self._backend.at_temperature_one():
            scored = self._backend.logprobs(batch, _schedule(shard))
        logprobs: list[float] = scored[1:].tolist()
        return logprobs

    def settle(self) -> int | None:
        """Abandon the step and return the policy version of these weights, None when an update broke off.

        Calls of a worker run one after the other, so this one waits until those before it have ended.
        """
        self._batches.abandon()
        return None if self._is_updating else self.policy_version

    def reconnect_data_plane(self, spec: DataPlaneSpec) -> None:
        """Close the connection to the data plane and use that of ``spec`` from now on."""
        self._batches.reconnect(spec)

    def connect_weights(self, receivers: Sequence[Any]) -> None:
        """Connect this worker's weight sender, if it has one, to the generation engines' weight receivers."""
        if self._weight_sender is not None:
            weights, adapter = self._backend.weight_metadata(), None
            if self._sends_adapters and (config := self._backend.adapter_config()):
                adapter = SentAdapter(config, sum(spec.num_bytes for spec in weights))
                weights = self._backend.adapter_metadata()
            self._weight_sender.connect(receivers, weights, adapter)

    def push_weights(self, version: int) -> dict[str, Metric]:
        """Send the weights of this pipeline stage as policy version ``version``; every rank that gathers
        weights calls it, and only the sender returns metrics.

        Raises ValueError when this worker is at another version, RuntimeError when it should send but was
        made without a sender.
        """
        if version != self.policy_version:
            raise ValueError(
                f"asked to push policy version {version}, but this worker is at {self.policy_version}"
            )
        if not gathers_weights(self.cfg, self.coordinates, self._weight_replicas):
            return {}
        stage = self._backend.stage_adapters if self._sends_adapters else self._backend.stage_weights
        weights = stage(self._weight_replicas)
        if not is_weight_sender(self.coordinates, self._weight_replicas):
            for _ in weights:  # this rank takes part in the gathering
                pass
            return {}
        if self._weight_sender is None:
            raise RuntimeError("this worker was made without a weight sender, so it cannot push weights")
        with span("send"):
            try:
                return dict(self._weight_sender.send(version, weights))
            finally:
                for _ in weights:  # after a transfer that broke off: the other ranks gather to the end
                    pass

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint directory; every rank that gathers weights calls it."""
        if gathers_weights(self.cfg, self.coordinates):
            self._backend.export_hf(Path(path))

    def save_checkpoint(self, path: str, writing: CheckpointWriting) -> None:
        """Write what training continues from into the empty directory ``path``; every rank calls it.

        No rank may still be writing the previous checkpoint. With background writing this returns once the
        state is copied, and the files are written afterwards.
        """
        self._checkpoint = CheckpointWriter(self._checkpoint_group, writing)
        self._backend.save_checkpoint(Path(path), self._checkpoint)
        random_state = _random_state_path(path, self.coordinates)
        save_random_state(random_state, self._backend.device, self._backend.random_states())
        self._checkpoint.complete(Path(path))

    def has_written_checkpoint(self) -> bool:
        """Return whether this rank's part of the latest checkpoint is on disk; raise what went wrong."""
        return self._checkpoint is None or self._checkpoint.is_done()

    def wait_for_checkpoint(self) -> dict[str, str]:
        """Wait until this rank's part of the latest checkpoint is on disk; return the SHA-256 of its share of
        the files, by name. Raises what went wrong."""
        return {} if self._checkpoint is None else self._checkpoint.wait(self._timeout_s)

    def corrupt_checkpoint_files(self, path: str, digests: Mapping[str, str]) -> list[str]:
        """Hash this rank's share of a checkpoint's files; return the names of those that differ from
        ``digests``."""
        share = own_share(digests, self.coordinates.rank, self.coordinates.layout.world_size)
        return differing_files(Path(path), {name: digests[name] for name in share})

    def load_checkpoint(self, path: str, policy_version: int) -> None:
        """Continue from a checkpoint, which another layout may have written; every rank calls it."""
        with told_in_short():
            self._backend.load_checkpoint(Path(path))
        if self._watch is not None:
            self._watch.forget_weights()
        self.policy_version = policy_version
        random_state = _random_state_path(path, self.coordinates)
        if random_state.is_file():
            self._backend.set_random_states(load_random_state(random_state, self._backend.device))

    def stop(self) -> None:
        """Leave the other workers and close the weight sender; safe to call twice."""
        if self._weight_sender is not None:
            self._weight_sender.close()
            self._weight_sender = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _join(self) -> None:
        """Join the process groups of the world and build this worker's part of the model."""
        coordinates = self.coordinates
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo" if self.cfg.device is Device.cpu else "nccl",
                init_method=self._init_method,
                rank=coordinates.rank,
                world_size=coordinates.layout.world_size,
                timeout=datetime.timedelta(seconds=self._timeout_s),
            )
        self._replica = Replica(coordinates, self._timeout_s)
        self._checkpoint_group = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=self._timeout_s)
        )
        self._backend = self._build_backend()
        self._watch: WorkerWatch | None = None
        if self._tripwires is not Tripwires.off:
            self._watch = WorkerWatch(
                self.cfg,
                self.loss,
                self.coordinates,
                self._backend.reference_weights,
                self._tripwires,
            )

    def _build_backend(self) -> TrainingBackend:
        # Each backend takes seconds to import, so only the one that is used is loaded.
        if self.cfg.backend is PolicyBackend.fsdp:
            with lasting_imports():
                from nemo_like.policy.fsdp.backend import FSDPPolicy

            return FSDPPolicy(self.cfg, self.loss, self.coordinates, self._temperature)
        # Megatron-core loads W&B, which takes half a second, for logs of its own.
        with lasting_imports(without=["wandb"]):
            from nemo_like.policy.megatron.backend import MegatronPolicy

        return MegatronPolicy(self.cfg, self.loss, self.coordinates, self._temperature)

    @property
    def _fetches(self) -> bool:
        return self.coordinates.is_leader or self.cfg.replica_fetch is ReplicaFetch.every_rank


@contextmanager
def _naming_samples(meta: KVBatchMeta) -> Iterator[None]:
    """Add the step to what a loss raises, and the sample where one is to blame."""
    try:
        yield
    except LossFailed as error:
        sample = ""
        if error.row is not None:
            group, (_, number) = meta.tag(GROUP_ID)[error.row], meta.rows[error.row]
            sample = f", sample {number} of prompt {group}"
        raise LossFailed(f"{meta.occasion}{sample}: {error}", error.row) from error


def _random_state_path(path: str, coordinates: Coordinates) -> Path:
    """Return the file of a rank's random state. Its name holds the world's size, since a world of another
    size cannot continue it."""
    return Path(path) / f"random_state_{coordinates.rank}_of_{coordinates.layout.world_size}.pt"


def _schedule(meta: KVBatchMeta) -> Schedule:
    if meta.schedule is None:
        raise ValueError(
            f"the batch of partition {meta.partition!r} has no schedule; shard it before dispatch"
        )
    return meta.schedule


class _Stopwatch:
    """Measures the ``seconds`` spent inside the block."""

    def __enter__(self) -> _Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._start
