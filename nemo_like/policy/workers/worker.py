"""One policy worker: it scores samples, trains on them, and sends its weights to the engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.algorithms.loss_traits import trains_on_entropy
from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    ENTROPIES,
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
    by_tag_name,
)
from nemo_like.cluster.breakdown import breaking_down, is_out_of_memory
from nemo_like.cluster.imports import load_target
from nemo_like.generation.options import LoraSync
from nemo_like.models.model_info import read_model_info
from nemo_like.observability.metrics import Metric
from nemo_like.observability.trace import span
from nemo_like.policy.backends.interface import (
    FurtherColumns,
    WeightSender,
    WeightSenderSpec,
    WorkerConnections,
    is_weight_sender,
)
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.batch.policy_columns import (
    model_reads,
    policy_declarations,
    scoring_reads,
    training_reads,
)
from nemo_like.policy.groups.parallelism import FIRST_REPLICA, gathers_weights, logprob_strategy
from nemo_like.policy.groups.results import WorkerScores
from nemo_like.policy.loss.checked_loss import own_reads
from nemo_like.policy.loss.entropy_threshold import entropy_threshold
from nemo_like.policy.loss.mismatch import logprob_mismatch
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.loss.token_advantages import reward_kl_tags
from nemo_like.policy.loss.update_watch import UpdateWatch
from nemo_like.policy.options import PolicyConfig
from nemo_like.policy.workers.group_worker import Stopwatch, schedule_of
from nemo_like.policy.workers.training_worker import TrainingWorker, naming_samples
from nemo_like.policy.workers.worker_watch import WorkerWatch
from nemo_like.tripwires.options import Tripwires
from nemo_like.weight_transport.buckets import SentAdapter

_NO_MORE = FurtherColumns()


class PolicyWorker(TrainingWorker):
    """One policy worker. ``weight_sender`` is a sender, or a description from which ``setup`` makes one."""

    def __init__(
        self,
        *,
        cfg: PolicyConfig,
        loss: LossConfig,
        connections: WorkerConnections,
        temperature: float,
        weight_sender: WeightSender | WeightSenderSpec | None,
        weight_replicas: Sequence[int] = FIRST_REPLICA,
        tripwires: Tripwires = Tripwires.off,
        further: FurtherColumns = _NO_MORE,
    ) -> None:
        """Keep the settings; ``setup`` loads the model and connects.

        ``temperature`` is the sampling temperature. The replicas ``weight_replicas`` send the weights to
        engines. ``tripwires`` decides what is also measured for the tripwires. Raises ValueError when the
        user's own loss cannot be found.
        """
        super().__init__(
            cfg=cfg,
            objective=PolicyObjective(loss, temperature),
            connections=connections,
        )
        self.loss = loss
        self._own_reads = (*own_reads(loss), *further.reads)
        self._model_reads = (*model_reads(cfg), *connections.inputs)
        self._further_writes = further.writes
        self._tripwires = tripwires
        self._weight_sender_source, self._weight_replicas = weight_sender, tuple(weight_replicas)
        lora_sync = (
            weight_sender.lora_sync if isinstance(weight_sender, WeightSenderSpec) else LoraSync.merged
        )
        self._sends_adapters = lora_sync is LoraSync.adapter

    def setup(self) -> None:
        """Join the other workers, load the model and connect to the data plane; return when this worker is
        ready."""
        super().setup()
        if self._tripwires is not Tripwires.off:
            reference = self._backend.reference_weights
            vocabulary = read_model_info(self.cfg.model_name, self.cfg.backend).vocab_size

            def losses(sees_losses: bool) -> UpdateWatch:
                return UpdateWatch(self.loss, sees_losses=sees_losses, vocabulary=vocabulary)

            self._watch = WorkerWatch(self.cfg, losses, self.coordinates, reference, self._tripwires)
            self._backend.watch = self._watch
        self._weight_sender: WeightSender | None = None
        if is_weight_sender(self.coordinates, self._weight_replicas):
            sender = self._weight_sender_source
            if isinstance(sender, WeightSenderSpec):
                sender = load_target(sender.target)(coordinates=self.coordinates, **sender.kwargs)
            self._weight_sender = sender

    def declarations(self) -> tuple[Declaration, ...]:
        """Return the columns that the policy and the loss write and read."""
        return policy_declarations(self.loss, self._own_reads, self._model_reads, self._further_writes)

    def training_reads(self) -> Sequence[Column]:
        """Return the columns that ``train`` fetches."""
        return training_reads(self.loss, self._own_reads, self._model_reads)

    @breaking_down()
    def compute_logprobs(self, meta: KVBatchMeta, columns: Sequence[Column]) -> WorkerScores | None:
        """Compute ``columns`` of the shard's samples and start to write them, in the background and in one
        write.

        prev_logprobs are log-probs under the current weights, reference_logprobs under the weights that the
        run started from. entropies, which only come with prev_logprobs, are under the current weights too.
        The leader returns, with prev_logprobs, tag mult_prob_error and the mismatch metrics, and with
        reference_logprobs the sums of the KL as tags where the reward has a KL term; the other ranks return
        None.
        """
        batch = self._batches.batch(meta, scoring_reads(columns, self.loss, self._model_reads))
        with span("compute"), Stopwatch() as compute:
            scored = self._scored(batch, schedule_of(meta), columns)
            routing = self._backend.routing_metrics()
        batch.add(scored)
        if self._watch is not None:
            self._watch.scored(scored, batch)
        if not self.coordinates.is_leader:
            return None
        self._batches.write(meta, scored)
        tags: dict[str, list[float]] = {}
        metrics = dict(routing)
        if PREV_LOGPROBS in scored:
            mismatch = logprob_mismatch(batch, scored[PREV_LOGPROBS])
            tags[MULT_PROB_ERROR.name] = mismatch.mult_prob_error
            metrics |= mismatch.metrics
        if REFERENCE_LOGPROBS in scored and self.loss.use_kl_in_reward:
            tags |= reward_kl_tags(batch, self.loss.reference_policy_kl_type)
        return WorkerScores(tags, metrics, compute.seconds)

    def _before_training(self, batch: PolicyBatch) -> None:
        """Find the entropy from which on tokens of the step have a policy gradient."""
        if not trains_on_entropy(self.loss):
            return
        trains = torch.repeat_interleave(batch.sample_values[SAMPLE_MASK.name].cpu() > 0, batch.lengths)
        chosen = (trains & batch.columns[RESPONSE_MASK.name].bool()).to(batch.device)
        entropies = batch.columns[ENTROPIES.name][chosen]
        share = self.loss.top_entropy_quantile
        batch.set_entropy_threshold(entropy_threshold(entropies, share, dist.group.WORLD))

    def _after_training(self) -> None:
        """Move the reference towards the policy, in the steps that ask for it."""
        period = self.loss.reference_policy_sync_steps
        if period is None or self.version % period:
            return
        self._backend.renew_reference(self.loss.reference_policy_sync_weight)
        if self._watch is not None:
            self._watch.renew_reference()

    def _scored(
        self, batch: PolicyBatch, schedule: Schedule, columns: Sequence[Column]
    ) -> dict[Column, Tensor]:
        """Return the values of ``columns``; one pass gives log-probs and entropies under the current
        weights."""
        found: dict[Column, Tensor] = {}
        if ENTROPIES in columns:
            scores = self._backend.scores_with_entropy(batch, schedule)
            assert scores.entropy is not None
            found |= {PREV_LOGPROBS: scores.logprobs, ENTROPIES: scores.entropy}
        elif PREV_LOGPROBS in columns:
            found[PREV_LOGPROBS] = self._backend.logprobs(batch, schedule)
        if REFERENCE_LOGPROBS in columns:
            found[REFERENCE_LOGPROBS] = self._backend.reference_logprobs(batch, schedule)
        return found

    @breaking_down()
    def accumulate(self, meta: KVBatchMeta) -> float | None:
        """Add the gradient of the loss of the shard's samples, not normalised, to the gradients that this
        worker holds for the first update of the next ``train``. The leader returns the seconds spent in the
        model, the other ranks None.

        Raises DataPlaneError, before anything was added, as ``train`` does.
        """
        batch = self._batches.batch(meta, self.training_reads())
        if self._watch is not None:
            self._watch.training(meta, batch)
        with span("compute"), Stopwatch() as compute, naming_samples(meta):
            self._backend.accumulate(batch, schedule_of(meta))
        return compute.seconds if self.coordinates.is_leader else None

    @breaking_down()
    def canary_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Score the tokens at temperature 1; return the log-probs of all but the first, nats. Every rank
        calls it."""
        with self._backend.at_temperature_one():
            return self.sample_logprobs(token_ids)

    def sample_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Score the tokens as one sample of a run, at its temperature; return the log-probs of all but the
        first, nats. Every rank calls it."""
        return self.samples_logprobs([token_ids])[0]

    def samples_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Score each sequence of tokens as one sample of a run, together in micro-batches as the run has
        them; return what ``sample_logprobs`` does of each. Every rank calls it."""
        lengths = tuple(map(len, sequences))
        meta = KVBatchMeta(
            "canary",
            tuple(Chunk(f"canary-{row}", (length,)) for row, length in enumerate(lengths)),
            tuple((row, 0) for row in range(len(lengths))),
            frozenset(),
            by_tag_name(
                {
                    SAMPLE_MASK: (1,) * len(lengths),
                    GROUP_ID: tuple(range(len(lengths))),
                    NUM_PROMPT_TOKENS: (1,) * len(lengths),
                    NUM_RESPONSE_TOKENS: tuple(length - 1 for length in lengths),
                }
            ),
        )
        strategy = logprob_strategy(self.cfg)
        (shard,) = shard_for_logprobs(meta, num_shards=1, global_batch_size=len(lengths), strategy=strategy)
        masks = [np.arange(length) > 0 for length in lengths]
        columns = {
            INPUT_IDS.name: np.concatenate([np.array(one, np.int32) for one in sequences]),
            RESPONSE_MASK.name: np.concatenate(masks).astype(np.uint8),
        }
        batch = PolicyBatch(columns, lengths, {}, self._backend.device)
        scored = self._backend.logprobs(batch, schedule_of(shard))
        return [one[1:].tolist() for one in scored.split(lengths)]

    def connect_weights(self, receivers: Sequence[Any]) -> None:
        """Connect this worker's weight sender, if it has one, to the generation engines' weight receivers."""
        if self._weight_sender is not None:
            weights, adapter = self._backend.weight_metadata(), None
            if self._sends_adapters and (config := self._backend.adapter_config()):
                adapter = SentAdapter(config, sum(spec.num_bytes for spec in weights))
                weights = self._backend.adapter_metadata()
            self._weight_sender.connect(receivers, weights, adapter)

    @breaking_down(is_out_of_memory)  # an engine's death raises other errors here
    def push_weights(self, version: int) -> dict[str, Metric]:
        """Send the weights of this pipeline stage as policy version ``version``; every rank that gathers
        weights calls it, and only the sender returns metrics.

        Raises ValueError when this worker is at another version, RuntimeError when it should send but was
        made without a sender.
        """
        if version != self.version:
            raise ValueError(f"asked to push policy version {version}, but this worker is at {self.version}")
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

    def look(self, function: str, *args: Any) -> Any:
        """Call a function, "package.module:name", with this worker, its backend and ``args``, and return its
        result."""
        return load_target(function)(self, self._backend, *args)

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint directory; every rank that gathers weights calls it."""
        if gathers_weights(self.cfg, self.coordinates):
            self._backend.export_hf(Path(path))

    def stop(self) -> None:
        """Leave the other workers and close the weight sender; safe to call twice."""
        if self._weight_sender is not None:
            self._weight_sender.close()
            self._weight_sender = None
        super().stop()
