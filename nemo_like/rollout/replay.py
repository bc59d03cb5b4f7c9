"""``ReplayRolloutActor``: stands in for ``SyncRolloutActor`` with rollouts that another run recorded.

    step, first group ──▶ file ──▶ one put ──▶ data plane

The driver calls both in the same way. A replay needs no engines, no environments and no tokenizer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemo_like.batch.columns import Column
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.recordings import read_manifest, recorded_steps, rollout_file
from nemo_like.checkpoint.digests import file_digest
from nemo_like.cluster.actors import ActorHandle
from nemo_like.data.interface import SourceReport
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.observability.metrics import Metric
from nemo_like.observability.summary import SampleAnswer
from nemo_like.rollout.data_plane_user import DataPlaneUser
from nemo_like.rollout.prompts import PromptBatch, RolloutMode, RolloutParts, RolloutResult, WantedGroups
from nemo_like.rollout.recorder import read_rollout
from nemo_like.rollout.rollout_columns import recorded_columns, recorded_declarations


@dataclass(slots=True)
class _Begun:
    """A rollout that has not handed over all of its groups yet."""

    partition: str
    batch: KVBatchMeta | None = None  # once it is put
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)  # positions of the groups that were handed over


class ReplayRolloutActor(DataPlaneUser):
    """A rollout actor that reads recorded rollouts; an asyncio actor hosts it."""

    def __init__(self, *, directory: str, data_plane: DataPlaneSpec) -> None:
        self._directory = Path(directory)
        self._columns: tuple[Column, ...] = ()
        self._begun: dict[str, _Begun] = {}  # by the rollouts' names
        super().__init__(data_plane)

    def attach(self, own_handle: ActorHandle) -> RolloutParts:
        """Read the manifest; return one source with the prompts of one rollout, and the recorded columns.

        A replay has no validation data. ``own_handle`` is not used, since no engine calls back.
        """
        manifest = read_manifest(self._directory)
        self._columns = recorded_columns(manifest)
        first = rollout_file(min(recorded_steps(self._directory)), 0)
        source = SourceReport(
            name="replay",
            num_prompts=manifest.step_shape.num_prompts,
            num_too_long=0,
            digest=file_digest(self._directory / first),  # no two recordings begin alike
        )
        return RolloutParts(
            {RolloutMode.training: (source,), RolloutMode.validation: ()},
            recorded_declarations(str(self._directory), manifest),
        )

    def begin(self, prompts: PromptBatch, partition: str) -> None:
        """Remember into which partition the recorded rollout of this step goes."""
        self._begun[prompts.name] = _Begun(partition)

    async def next_part(self, prompts: PromptBatch, wanted: WantedGroups) -> RolloutResult:
        """Return the wanted groups of this step's recorded rollout, or else the first ``wanted.at_least``
        groups that are left. Raises ValueError when no recording fits."""
        if prompts.mode is not RolloutMode.training:
            raise ValueError("a replay has training rollouts only; it cannot validate")
        return await asyncio.to_thread(self._replay, prompts, wanted)

    def abandon(self) -> None:
        """Forget the rollouts that have begun."""
        self._begun.clear()

    def reconnect(
        self,
        engines: Sequence[ActorHandle],
        environments: Mapping[str, Sequence[ActorHandle]],
        data_plane: DataPlaneSpec,
    ) -> None:
        """Use this data plane from now on; a replay has no engines and no environments."""
        self._move_to(data_plane)

    def sample_answers(self) -> list[SampleAnswer]:
        """Return an empty list, since a replay does not validate."""
        return []

    def _replay(self, prompts: PromptBatch, wanted: WantedGroups) -> RolloutResult:
        """Put the whole rollout at the first call; return the wanted groups at each call."""
        started_s = time.monotonic()
        begun = self._begun[prompts.name]
        if begun.batch is None:
            recorded = read_rollout(self._directory, self._columns, prompts)
            flat = recorded.flat
            begun.metrics = recorded.metrics
            begun.batch = self._data_plane.put(
                begun.partition,
                flat.columns,
                lengths=flat.lengths,
                chunk_sizes=flat.chunk_sizes,
                tags=flat.tags,
            )
        left = [position for position in range(len(prompts)) if position not in begun.taken]
        positions = wanted.positions or left[: wanted.at_least]
        begun.taken.update(positions)
        is_last = len(begun.taken) == len(prompts)
        if is_last:
            del self._begun[prompts.name]
        size = prompts.num_generations
        return RolloutResult(
            batch=begun.batch.subset(
                [row for position in positions for row in range(position * size, (position + 1) * size)]
            ),
            metrics=begun.metrics if is_last else {},
            generation_s=0.0,
            reward_s=0.0,
            put_s=time.monotonic() - started_s,
            operations=self._data_plane.take_operations(),
            is_last=is_last,
        )
