"""Writes what a step sampled as JSON lines for people: conversations, rewards, and each sample's outcome.

    put ──▶ remember(batch, conversations)
    dump ──▶ the driver's ledger (tags) + remembered conversations ──▶ rollouts/step_N.jsonl
    a validation ends ──▶ its batch + its conversations ──▶ rollouts/validation_N.jsonl

An excerpt (``excerpt.py``) has the same lines of fewer samples, each with the number that there were.
Texts stay in the rollout actor; the driver sends tags alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nemo_like.batch.columns import IMAGE_COLUMNS, Column
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.recordings import ROUTED_EXPERTS
from nemo_like.batch.tags import ADVANTAGE, GROUP_ID, OUTCOME, REWARD, SCALED_REWARD, SHAPED_REWARD
from nemo_like.data.images import Picture
from nemo_like.data.interface import Prompt
from nemo_like.data.messages import as_text
from nemo_like.observability.disk import write_whole
from nemo_like.rollout.conversation import Conversation
from nemo_like.rollout.dumped_tokens import Scores, TokenTexts, dumped_tokens
from nemo_like.rollout.flatten import sample_value
from nemo_like.rollout.options import EXCERPT_OF
from nemo_like.rollout.prompts import PromptOrigin

# Pictures and the experts of every token and layer are large, and tell people nothing.
_NOT_DUMPED = frozenset({ROUTED_EXPERTS, *(column.name for column in IMAGE_COLUMNS)})
# Tags that mean nothing for a sample whose reward failed: they hold a 0 in place of none.
_REWARD_TAGS = tuple(tag.name for tag in (REWARD, SCALED_REWARD, SHAPED_REWARD, ADVANTAGE))


class StepSamples:
    """Keeps the conversations of each step, by sample id, until they are written."""

    def __init__(self, texts: TokenTexts) -> None:
        """Keep nothing yet. ``texts`` returns the text of each token by itself."""
        self._texts = texts
        self._samples: dict[int, dict[str, tuple[Conversation, PromptOrigin]]] = {}  # by step
        self._columns: Sequence[Column] = ()

    def remember(
        self,
        step: int,
        batch: KVBatchMeta,
        groups: Sequence[Sequence[Conversation]],
        origins: Sequence[PromptOrigin],
        columns: Sequence[Column] = (),
    ) -> None:
        """Keep the conversations of ``batch``, in its order, until ``write`` is called for the step.

        ``origins`` says for each group where its prompt is from. ``columns`` are the columns that
        conversations bring besides tokens and log-probs.
        """
        self._columns = columns
        samples = [
            (sample, origin) for group, origin in zip(groups, origins, strict=True) for sample in group
        ]
        self._samples.setdefault(step, {}).update(zip(batch.sample_ids, samples, strict=True))

    def write(
        self,
        path: Path,
        step: int,
        ledger: Sequence[KVBatchMeta],
        scores: Mapping[str, Scores] = MappingProxyType({}),
        *,
        num_samples: int | None = None,
    ) -> None:
        """Write one line per sample of the ledger, by (group, generation); forget the conversations of this
        step and of earlier ones.

        ``scores`` has the trainer's numbers for a sample's tokens, by sample id. Where the step had more than
        the ledger's samples, ``num_samples``, each line says so. Raises KeyError for a sample that is not
        remembered.
        """
        samples, num_written = self._samples[step], sum(map(len, ledger))
        is_excerpt = num_samples is not None and num_samples > num_written
        first = {"step": step, **({EXCERPT_OF: num_samples} if is_excerpt else {})}
        lines = [
            {**first, **self._line(*samples[sample_id], tags, scores.get(sample_id, {}))}
            for batch in ledger
            for sample_id, tags in _rows(batch)
        ]
        lines.sort(key=lambda line: (line["group"], line["generation"]))
        self._samples = {later: kept for later, kept in self._samples.items() if later > step}
        path.parent.mkdir(exist_ok=True)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_whole(path, text.encode(), f"the rollouts in {path.name}")

    def remembered(self, step: int, ledger: Sequence[KVBatchMeta]) -> list[KVBatchMeta]:
        """Return the samples of the ledger whose conversations are kept."""
        kept = self._samples[step]
        rows = [[row for row, name in enumerate(batch.sample_ids) if name in kept] for batch in ledger]
        return [batch.subset(found) for batch, found in zip(ledger, rows, strict=True) if found]

    def _line(
        self, sample: Conversation, origin: PromptOrigin, tags: dict[str, Any], scores: Scores
    ) -> dict[str, Any]:
        if sample.failure is not None:
            tags = {name: None if name in _REWARD_TAGS else value for name, value in tags.items()}
        return {
            "group": tags.pop(GROUP_ID.name),
            "generation": sample.generation,
            "outcome": tags.pop(OUTCOME.name, None),
            "env": sample.task_prompt.env,
            "source": origin.source,
            "index": origin.index,
            **_conversation(sample, self._columns),
            "tokens": dumped_tokens(sample, tags, scores, self._texts),
            **tags,
        }


def _rows(batch: KVBatchMeta) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, sample_id in enumerate(batch.sample_ids):
        yield sample_id, {name: _json_value(values[index]) for name, values in batch.tags.items()}


def _conversation(sample: Conversation, columns: Sequence[Column]) -> dict[str, Any]:
    failure = sample.failure
    return {
        "prompt": _as_text(sample.task_prompt.prompt),
        **(
            {"images": [_image(one) for one in sample.task_prompt.images]}
            if sample.task_prompt.images
            else {}
        ),
        "turns": list(_turns(sample)),
        "answer": sample.task_prompt.answer,
        "rewards": {name: _json_value(value) for name, value in sample.rewards.items()},
        "failure": None if failure is None else failure.reason,
        "failure_kind": None if failure is None else failure.kind.name,
        **({"columns": shown} if (shown := _columns_of(sample, columns)) else {}),
    }


def _columns_of(sample: Conversation, columns: Sequence[Column]) -> dict[str, Any]:
    """Return a sample's value of each column; for a column with a value per prompt, the value that this
    sample brings."""
    passages = [sample.prompt_passage, *sample.passages]
    return {
        column.name: _shown(sample_value(column, passages))
        for column in columns
        if column.name not in _NOT_DUMPED
    }


def _image(picture: Picture) -> str:
    """Return an image's path, or, when the record itself holds the image, which record that is."""
    return picture.source if isinstance(picture.source, str) else picture.where


def _shown(value: Any) -> Any:
    """Convert a value for JSON: arrays and tensors to lists and numbers, types that JSON lacks to a repr."""
    try:
        return _shown_parts(value)
    except RecursionError:
        return repr(value)


def _shown_parts(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, dict):
        names = (key if isinstance(key, str) else repr(key) for key in value)
        return dict(zip(names, map(_shown_parts, value.values()), strict=True))
    if isinstance(value, list | tuple):
        return list(map(_shown_parts, value))
    return _json_value(value) if isinstance(value, str | int | float | None) else repr(value)


def _turns(sample: Conversation) -> Iterator[dict[str, str]]:
    for exchange in sample.history:
        yield {"role": "assistant", "content": exchange.response}
        yield {"role": "environment", "content": exchange.observation}
    yield {"role": "assistant", "content": sample.latest_response}


def _as_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"[{message.role}] {as_text(message)}" for message in prompt)


def _json_value(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot write, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
