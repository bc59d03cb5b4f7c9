"""The columns that each part of a rollout writes.

Standard library only: a run's columns are checked before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nemo_like.algorithms.loss_traits import punishes_messages
from nemo_like.batch.columns import (
    GENERATION_LOGPROBS,
    IMAGE_COLUMNS,
    INPUT_IDS,
    MESSAGE_FLAGS,
    MESSAGES,
    PARENT_GAPS,
    POLICY_VERSIONS,
    RESPONSE_MASK,
    ROLLOUT_COLUMNS,
    Column,
    ColumnError,
    Declaration,
    Layout,
)
from nemo_like.batch.recordings import RecordingManifest
from nemo_like.batch.routed_experts import replayed_columns
from nemo_like.data.interface import TaskPrompt
from nemo_like.data.options import DatasetConfig
from nemo_like.data.sources import RECORD_COLUMN, data_sources
from nemo_like.data_plane.storage_errors import ColumnMismatch
from nemo_like.models.model_info import has_vision_tower
from nemo_like.rollout.tasks import (
    RolloutConfigGroups,
    TaskConfigGroups,
    has_agents,
    judging_environments,
    task_environments,
)


def rollout_declarations(
    cfg: RolloutConfigGroups, environments: Mapping[str, Sequence[Column]]
) -> tuple[Declaration, ...]:
    """Return the columns that each part of a rollout writes; ``environments`` has each environment's columns
    by name.

    Raises ColumnError when two environments that judge the same samples write one column.
    """
    for task in task_environments(cfg):
        _check_judges(task, {name: environments.get(name, ()) for name in judging_environments(cfg, task)})
    training = {name for source in cfg.data.train for name in judging_environments(cfg, source.env)}
    return (
        Declaration("rollout", writes=(INPUT_IDS, RESPONSE_MASK, *_of_messages(cfg))),
        Declaration("generation", writes=engine_columns(cfg)),
        *_of_images(cfg),
        *(Declaration("agents", writes=(column,)) for column in forest_columns(cfg)),
        *([Declaration("rollout.keep_messages", writes=(MESSAGES,))] if cfg.rollout.keep_messages else []),
        *_of_records(cfg),
        *(
            Declaration(f"env.{name}", tuple(columns), trains=name in training)
            for name, columns in environments.items()
        ),
    )


def forest_columns(cfg: TaskConfigGroups) -> tuple[Column, ...]:
    """Return the columns that say which token follows which, where samples may be forests: every phase reads
    them with the tokens."""
    return (PARENT_GAPS,) if has_agents(cfg) else ()


def _check_judges(task: str, written: Mapping[str, Sequence[Column]]) -> None:
    writers: dict[str, str] = {}
    for name, columns in written.items():
        for column in columns:
            if (other := writers.setdefault(column.name, name)) != name:
                raise ColumnError(
                    f"column {column.name!r} is written by env.{other} and by env.{name}, which both judge "
                    f"the samples of env.{task}; rename one of the two"
                )


def engine_columns(cfg: RolloutConfigGroups) -> tuple[Column, ...]:
    """Return the columns that engines write: the log-probs of every ``Response``, and the values in its
    ``columns``."""
    of_versions = (POLICY_VERSIONS,) if cfg.grpo.max_staleness > 0 else ()
    return (GENERATION_LOGPROBS, *of_versions, *replayed_columns(cfg.policy))


def recorded_declarations(directory: str, manifest: RecordingManifest) -> tuple[Declaration, ...]:
    """Return the declaration of a replay: it writes all recorded columns."""
    return (Declaration(f"rollout.replay={directory}", writes=recorded_columns(manifest)),)


def recorded_columns(manifest: RecordingManifest) -> tuple[Column, ...]:
    """Return the columns of a recording; an old manifest without columns means those of every run."""
    if manifest.columns is None:
        return ROLLOUT_COLUMNS
    return tuple(
        Column(
            one["name"],
            one["dtype"],
            Layout(one["layout"]),
            inner_shape=tuple(one["inner_shape"]),
            per_prompt=one["per_prompt"],
        )
        for one in manifest.columns
    )


def written_down(columns: Iterable[Column]) -> list[dict[str, Any]]:
    """Return columns in the form of a manifest, which ``recorded_columns`` reads."""
    return [
        {
            "name": column.name,
            "dtype": column.dtype,
            "layout": column.layout.value,
            "inner_shape": list(column.inner_shape),
            "per_prompt": column.per_prompt,
        }
        for column in columns
    ]


def unfit_values(
    source: DatasetConfig, task_prompt: TaskPrompt, num_tokens: int | None
) -> Iterator[ColumnMismatch]:
    """Yield an error for each value of a prompt that does not fit the column its source declares. Without
    ``num_tokens``, the length of the prompt, columns with a value per token are skipped."""
    # Only callers with values need numpy.
    from nemo_like.environments.column_values import column_value

    for name, text in source.columns.items():
        column = record_column(name, text)
        if num_tokens is None and column.layout is Layout.per_token:
            continue
        try:
            column_value(column, task_prompt.columns[name], num_tokens or 0)
        except ColumnMismatch as error:
            yield error


def record_column(name: str, text: str) -> Column:
    """Return the column that ``data.*.columns`` describes by a text such as ``float32[2]``.

    It has a value per prompt unless it is per token. Raises ValueError when ``text`` describes no column.
    """
    match = RECORD_COLUMN.fullmatch(text)
    if match is None:
        raise ValueError(f"data.*.columns.{name}={text} is no column")
    if match["layout"]:
        return Column(name, "", Layout(match["layout"]), per_prompt=True)
    shape = tuple(int(size) for size in match["shape"].split(",")) if match["shape"] else ()
    is_per_token = match["per_token"] is not None
    layout = Layout.per_token if is_per_token else Layout.per_sample
    return Column(name, match["dtype"], layout, inner_shape=shape, per_prompt=not is_per_token)


def _of_messages(cfg: RolloutConfigGroups) -> tuple[Column, ...]:
    """Return the column of what is wrong with responses, where the loss punishes it."""
    return (MESSAGE_FLAGS,) if punishes_messages(cfg.loss_fn) else ()


def _of_images(cfg: RolloutConfigGroups) -> Iterator[Declaration]:
    """Yield the columns of images. A model with a vision tower reads them even where no prompt has an
    image."""
    if has_vision_tower(cfg.policy.model_name):
        yield Declaration("images", writes=IMAGE_COLUMNS)


def _of_records(cfg: RolloutConfigGroups) -> Iterator[Declaration]:
    for key, source in data_sources(cfg.data):
        if source.columns:
            columns = [record_column(name, text) for name, text in source.columns.items()]
            yield Declaration(key, tuple(columns), trains=key.startswith("data.train"))
