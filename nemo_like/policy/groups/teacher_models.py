"""Which of a teacher's models scores each sample: the model of the sample's task. Standard library only."""

from __future__ import annotations

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import TASK
from nemo_like.policy.options import TeacherConfig


def models_of_samples(cfg: TeacherConfig, batch: KVBatchMeta) -> list[str]:
    """Return the checkpoint that scores each sample; with ``teacher.models`` the batch needs the tag task."""
    if not cfg.models:
        return [cfg.model_name] * len(batch)
    return [cfg.models.get(task, cfg.model_name) for task in batch.tag(TASK)]
