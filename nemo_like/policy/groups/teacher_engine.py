"""A teacher that is one vLLM engine, which takes the place of a worker group of one process.

meta ──▶ fetch token ids ──▶ the engine scores them ──▶ write the columns that the loss reads
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    INPUT_IDS,
    RESPONSE_MASK,
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
    ) -> None:
        """Keep the settings; ``setup`` starts the engine and connects.

        ``loss`` is the student's loss, which decides what is scored. The engine computes as ``generation``
        says, in one process without quantization; ``timeout_s`` bounds its start and every later call. Raises
        ColumnError when the loss reads no column of a teacher.
        """
        self._columns = teacher_columns(own_reads(loss))
        self._cfg, self._timeout_s = cfg, timeout_s
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
        return (teacher_declaration(self._columns),)

    def compute_teacher_logprobs(self, meta: KVBatchMeta, model: str) -> WorkerScores:
        """Score the samples and write the columns that the loss reads; return the operations in the data
        plane once the columns are stored.

        ``model`` is the engine's own checkpoint, since it has no other.
        """
        with span("fetch"):
            fetched = self._plane.fetch(meta, [INPUT_IDS.name, RESPONSE_MASK.name])
        token_ids, mask = (np.asarray(fetched[column.name]) for column in (INPUT_IDS, RESPONSE_MASK))
        sequences = np.split(token_ids, np.cumsum(meta.lengths)[:-1])
        with span("compute"), Stopwatch() as compute:
            scores = self._engine.score([one.tolist() for one in sequences], num_most_likely(self._columns))
        found = scores_by_column(
            self._columns,
            logprobs=scores.logprobs,
            topk_ids=scores.topk_ids,
            topk_logprobs=scores.topk_logprobs,
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
