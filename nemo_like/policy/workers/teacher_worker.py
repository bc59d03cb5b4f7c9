"""One worker of a teacher: it scores the student's samples by a frozen model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemo_like.algorithms.logprobs import LogprobSettings
from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    INPUT_IDS,
    RESPONSE_MASK,
    Column,
    Declaration,
)
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.cluster.breakdown import breaking_down
from nemo_like.models.model_info import read_model_info
from nemo_like.observability.trace import span
from nemo_like.policy.backends.interface import WorkerConnections
from nemo_like.policy.batch.teacher_columns import (
    num_most_likely,
    scores_by_column,
    teacher_columns,
    teacher_declaration,
)
from nemo_like.policy.groups.layout import further_models, models_of_samples
from nemo_like.policy.groups.results import WorkerScores
from nemo_like.policy.loss.checked_loss import own_reads
from nemo_like.policy.loss.objective import TeacherObjective
from nemo_like.policy.options import TeacherConfig
from nemo_like.policy.workers.group_worker import GroupWorker, Stopwatch, schedule_of


class TeacherWorker(GroupWorker):
    """One worker of a teacher."""

    def __init__(
        self,
        *,
        cfg: TeacherConfig,
        loss: LossConfig,
        connections: WorkerConnections,
        temperature: float,
        vocab_size: int,
    ) -> None:
        """Keep the settings; ``setup`` loads the model and connects.

        ``loss`` is the student's loss, which decides what is scored; ``temperature`` is the sampling
        temperature. ``vocab_size`` is the number of tokens of the student's model; the teacher gives further
        tokens of its own, which no text contains, a probability of 0. Raises ColumnError when the loss reads
        no column of a teacher.
        """
        self._teacher = cfg
        self._columns = teacher_columns(own_reads(loss))
        own_size = read_model_info(cfg.model_name, cfg.backend).vocab_size
        scoring = LogprobSettings(
            temperature=temperature,
            top_k=num_most_likely(self._columns),
            forbidden_ids=tuple(range(vocab_size, own_size)),
        )
        super().__init__(
            cfg=cfg,
            objective=TeacherObjective(scoring, further_models(cfg)),
            connections=connections,
        )

    def declarations(self) -> tuple[Declaration, ...]:
        """Return the columns that the teacher writes and reads."""
        return (teacher_declaration(self._columns, self._connections.inputs),)

    @breaking_down()
    def compute_teacher_logprobs(self, meta: KVBatchMeta, model: str) -> WorkerScores | None:
        """Score the shard's samples by ``model``, and write the loss's columns of the samples that ``model``
        teaches; return when they are stored.

        The leader returns its operations in the data plane; the other ranks return None.
        """
        inputs = self._connections.inputs
        batch = self._batches.batch(meta, (INPUT_IDS, RESPONSE_MASK, *inputs))
        with span("compute"), Stopwatch() as compute, self._backend.weights_of(model):
            scores = self._backend.scores(batch, schedule_of(meta))
        if self.coordinates.is_leader:
            found = scores_by_column(
                self._columns,
                logprobs=scores.logprobs,
                topk_ids=scores.topk_ids,
                topk_logprobs=scores.topk_logprobs,
            )
            self._write_own(meta, model, found)
        # No later phase has these samples.
        operations = self._batches.finish(meta.partition)
        if not self.coordinates.is_leader:
            return None
        return WorkerScores({}, {}, compute.seconds, operations)

    def _write_own(self, meta: KVBatchMeta, model: str, columns: Mapping[Column, Tensor]) -> None:
        """Write the columns of the samples that ``model`` teaches; the other samples only filled up the
        shard."""
        models = models_of_samples(self._teacher, meta)
        own = [row for row, teaches in enumerate(models) if teaches == model]
        if len(own) == len(meta):
            self._batches.write(meta, columns)
        elif own:
            ours = {column: _of_rows(values, meta.lengths, own) for column, values in columns.items()}
            self._batches.write(meta.subset(own), ours)


def _of_rows(values: Tensor, lengths: Sequence[int], rows: Sequence[int]) -> Tensor:
    """Return the packed ``values`` of ``rows``; ``lengths`` has the lengths of all rows."""
    by_row = values.split(list(lengths))
    return torch.cat([by_row[row] for row in rows])
