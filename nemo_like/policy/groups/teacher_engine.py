"""A teacher that is one vLLM engine, which takes the place of a worker group of one process.

meta ──▶ fetch token ids ──▶ the engine scores them ──▶ write the columns that the loss reads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    INPUT_IDS,
    PARENT_GAPS,
    RESPONSE_MASK,
    Column,
    Declaration,
)
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.data_plane.connection import connect, reconnect
from nemo_like.data_plane.interface import DataPlane
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.generation.engine_spec import EngineSpec
from nemo_like.generation.interface import ScoringEngine
from nemo_like.generation.options import GenerationConfig
from nemo_like.generation.speculation import ARGUMENT
from nemo_like.generation.vllm_engine import VllmEngine
from nemo_like.observability.trace import span
from nemo_like.policy.batch.teacher_columns import (
    num_most_likely,
    scores_by_column,
    teacher_columns,
    teacher_declaration,
)
from nemo_like.policy.batch.token_runs import TokenRuns, piece_indexes
from nemo_like.policy.groups.results import WorkerScores
from nemo_like.policy.loss.checked_loss import own_reads
from nemo_like.policy.options import TeacherConfig
from nemo_like.policy.workers.group_worker import Stopwatch


class TeacherEngine:
    """Answers what ``TeacherWorkerGroup`` asks of a teacher's only worker, by a vLLM engine.

    It belongs in a serial actor whose process was started with ``engine_environment``.
    """

    def __init__(
        self,
        *,
        cfg: TeacherConfig,
        loss: LossConfig,
        generation: GenerationConfig,
        data_plane: DataPlane | DataPlaneSpec,
        timeout_s: float,
        inputs: Sequence[Column] = (),
    ) -> None:
        """Keep the settings; ``setup`` starts the engine and connects.

        ``loss`` is the student's loss, which decides what is scored. The engine computes as ``generation``
        says, in one process without quantization; ``timeout_s`` bounds its start and every later call.
        ``inputs`` are columns that it reads besides tokens. Raises
        ColumnError when the loss reads no column of a teacher.
        """
        self._columns = teacher_columns(own_reads(loss))
        self._cfg, self._timeout_s, self._inputs = cfg, timeout_s, inputs
        own = replace(
            generation.vllm_cfg,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            num_nodes=1,
            quantization=None,
        )
        # An engine that only scores drafts no tokens.
        kwargs = {name: value for name, value in generation.vllm_kwargs.items() if name != ARGUMENT}
        self._generation = replace(generation, vllm_cfg=own, vllm_kwargs=kwargs)
        self._data_plane_source = data_plane

    def setup(self) -> None:
        """Start the engine and connect to the data plane; return when both are ready. Raises GenerationError
        when the engine does not start."""
        self._engine: ScoringEngine = VllmEngine(
            name="teacher",
            spec=EngineSpec(
                model_name=self._cfg.model_name,
                generation=self._generation,
                device=self._cfg.device,
                precision=self._cfg.precision,
                # An engine generates one token more than it scores.
                max_total_sequence_length=self._cfg.max_total_sequence_length + 1,
                seed=0,
            ),
            timeout_s=self._timeout_s,
        )
        source = self._data_plane_source
        self._plane = connect(source) if isinstance(source, DataPlaneSpec) else source

    def declarations(self) -> tuple[Declaration, ...]:
        """Return the columns that the teacher writes and reads."""
        return (teacher_declaration(self._columns, self._inputs),)

    def compute_teacher_logprobs(self, meta: KVBatchMeta, model: str) -> WorkerScores:
        """Score the samples and write the columns that the loss reads; return the operations in the data
        plane once the columns are stored.

        ``model`` is the engine's own checkpoint, since it has no other.
        """
        with span("fetch"):
            columns = (INPUT_IDS, RESPONSE_MASK, *self._inputs)
            fetched = self._plane.fetch(meta, [column.name for column in columns])
        token_ids, mask = (np.asarray(fetched[column.name]) for column in (INPUT_IDS, RESPONSE_MASK))
        gaps = fetched.get(PARENT_GAPS.name)
        runs = TokenRuns(torch.tensor(meta.lengths), None if gaps is None else torch.tensor(gaps))
        paths = runs.paths()
        # The engine reads whole paths; of each the scores of the run's own tokens are kept.
        ends = torch.tensor([len(path) for path in paths]).cumsum(0)
        own = piece_indexes(ends - runs.lengths, runs.lengths).numpy()
        with span("compute"), Stopwatch() as compute:
            asked = [token_ids[path].tolist() for path in paths]
            scores = self._engine.score(asked, num_most_likely(self._columns))
        found = scores_by_column(
            self._columns,
            logprobs=scores.logprobs[own],
            topk_ids=None if scores.topk_ids is None else scores.topk_ids[own],
            topk_logprobs=None if scores.topk_logprobs is None else scores.topk_logprobs[own],
        )
        for values in found.values():
            values[mask == 0] = 0
        with span("write"):
            self._plane.write(meta, {column.name: values for column, values in found.items()})
        self._plane.forget(meta.partition)
        return WorkerScores({}, {}, compute.seconds, self._plane.take_operations())

    def settle(self) -> int:
        """Abandon the step and return the version of the weights, which never change: 0."""
        self._plane.take_operations()
        return 0

    def reconnect_data_plane(self, spec: DataPlaneSpec) -> None:
        """Close the connection to the data plane and connect to the data plane of ``spec`` instead."""
        self._plane = reconnect(self._plane, spec)
