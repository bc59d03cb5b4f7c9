"""``ReplayRolloutActor``: stands in for ``SyncRolloutActor`` with rollouts that another run recorded.

    step, first group ──▶ file ──▶ one put ──▶ data plane

The driver calls both in the same way. A replay needs no engines, no environments and no tokenizer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_like.batch.columns import Column
from nemo_like.cluster.actors import ActorHandle
from nemo_like.config.recordings import read_manifest
from nemo_like.data.interface import SourceReport
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.observability.summary import SampleAnswer
from nemo_like.rollout.data_plane_user import DataPlaneUser
from nemo_like.rollout.prompts import PromptBatch, RolloutMode, RolloutParts, RolloutResult
from nemo_like.rollout.recorder import read_rollout
from nemo_like.rollout.rollout_columns import recorded_columns, recorded_declarations


class ReplayRolloutActor(DataPlaneUser):
    """A rollout actor that reads recorded rollouts; an asyncio actor hosts it."""

    def __init__(self, *, directory: str, data_plane: DataPlaneSpec) -> None:
        self._directory = Path(directory)
        self._columns: tuple[Column, ...] = ()
        super().__init__(data_plane)

    def attach(self, own_handle: ActorHandle) -> RolloutParts:
        """Read the manifest; return one source with the prompts of one rollout, and the recorded columns.

        There is nothing to validate on. ``own_handle`` is not used, since no engine calls back.
        """
        manifest = read_manifest(self._directory)
        self._columns = recorded_columns(manifest)
        source = SourceReport(name="replay", num_prompts=manifest.num_prompts_per_step, num_too_long=0)
        return RolloutParts(
            {RolloutMode.training: (source,), RolloutMode.validation: ()},
            recorded_declarations(str(self._directory), manifest),
        )

    async def run(self, prompts: PromptBatch, partition: str) -> RolloutResult:
        """Put the recorded rollout of this step; raises ValueError when there is none that fits."""
        if prompts.mode is not RolloutMode.training:
            raise ValueError("a replay has training rollouts only; it cannot validate")
        started_s = time.monotonic()
        return await asyncio.to_thread(self._replay, prompts, partition, started_s)

    def abandon(self) -> None:
        """Do nothing: a replay is never under way for long."""

    def reconnect(
        self,
        engines: Sequence[ActorHandle],
        environments: Mapping[str, Sequence[ActorHandle]],
        data_plane: DataPlaneSpec,
    ) -> None:
        """Put into this data plane from now on; a replay has no engines and no environments."""
        self._move_to(data_plane)

    def sample_answers(self) -> list[SampleAnswer]:
        """Return none, since a replay does not validate."""
        return []

    def _replay(self, prompts: PromptBatch, partition: str, started_s: float) -> RolloutResult:
        recorded = read_rollout(self._directory, self._columns, prompts)
        flat = recorded.flat
        batch = self._data_plane.put(
            partition, flat.columns, lengths=flat.lengths, chunk_sizes=flat.chunk_sizes, tags=flat.tags
        )
        return RolloutResult(
            batch=batch,
            metrics=recorded.metrics,
            generation_s=0.0,
            reward_s=0.0,
            put_s=time.monotonic() - started_s,
            operations=self._data_plane.take_operations(),
        )
