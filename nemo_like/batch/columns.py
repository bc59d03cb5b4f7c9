"""Columns of a batch: how a column is declared, GRPO's own columns, and how a run gathers its columns.

    a dataset, an environment, an engine, a policy phase ── Declaration(writes, reads) ─┐
    the loss                                             ── Declaration(reads) ─────────┴─▶ gather_columns

``gather_columns`` is called once, at the start of a run; every partition then has these columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

# The dtypes that stored values may have. Storage encodes a dtype by its position here.
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip


class Layout(Enum):
    """The shape of one sample's value; T is the sample's own length (prompt and response)."""

    per_token = "per_token"  # [T, *inner]: a batch is one array [sum of T, *inner]; the meta has the lengths
    per_sample = "per_sample"  # [*inner]: a batch is one array [N, *inner]
    ragged = "ragged"  # any number of arrays or torch tensors, each of any shape and dtype
    objects = "objects"  # an arbitrary Python object


@dataclass(frozen=True, slots=True)
class Column:
    """One declared column.

    ``dtype`` is the numpy name of the dtype, the narrowest that is exact; "bfloat16" columns are
    torch tensors, since numpy has no such dtype. A ragged or objects column declares "", since
    each of its values may have another dtype. A ``per_prompt`` column has one value for all samples of a
    prompt's group: a batch of C chunks has C values, [C, *inner] where dense. It cannot be per_token.

    Raises ValueError for a declaration that contradicts itself.
    """

    name: str
    dtype: str
    layout: Layout
    description: str = field(default="", compare=False)
    inner_shape: tuple[int, ...] = ()
    per_prompt: bool = False
    writer: str = field(default="", compare=False)  # the part of the run that writes it; "" until gathered

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner_shape", tuple(self.inner_shape))
        if not self.name or "/" in self.name:
            raise ValueError(f"column {self.name!r}: a name must have letters, and no slash")
        if self.is_dense and self.dtype not in DTYPES:
            raise ValueError(
                f"column {self.name!r}: dtype={self.dtype!r} is none of {', '.join(DTYPES)}, of which a "
                f"{self.layout.value} column needs one"
            )
        if not self.is_dense and (self.dtype or self.inner_shape):
            raise ValueError(
                f"column {self.name!r}: a {self.layout.value} column has no dtype and no inner_shape of its "
                'own; declare dtype=""'
            )
        if not all(isinstance(size, int) and size >= 0 for size in self.inner_shape):
            raise ValueError(f"column {self.name!r}: inner_shape={self.inner_shape} is not made of sizes")
        if self.per_prompt and self.layout is Layout.per_token:
            raise ValueError(
                f"column {self.name!r}: values per token are each sample's own; per_prompt goes with "
                "per_sample, ragged and objects"
            )

    @property
    def is_dense(self) -> bool:
        """Whether a batch of this column is one array, rather than a sequence with a value per sample."""
        return self.layout in (Layout.per_token, Layout.per_sample)


INPUT_IDS = Column("input_ids", "int32", Layout.per_token, "token ids of prompt and response")
RESPONSE_MASK = Column(
    "response_mask",
    "uint8",
    Layout.per_token,
    "1 on tokens the policy generated, 0 on prompt, tool and environment tokens",
)
GENERATION_LOGPROBS = Column(
    "generation_logprobs",
    "float32",
    Layout.per_token,
    "nats, log p(token t | tokens before t) as the generation engine sampled it; 0 where response_mask is 0",
)
POLICY_VERSIONS = Column(
    "policy_versions",
    "int32",
    Layout.per_token,
    "with grpo.max_staleness above 0: the policy version whose weights sampled the token, -1 for the "
    "checkpoint's; 0 where response_mask is 0",
)
PREV_LOGPROBS = Column(
    "prev_logprobs",
    "float32",
    Layout.per_token,
    "nats, the same under the training engine's weights before the step; 0 where response_mask is 0",
)
REFERENCE_LOGPROBS = Column(
    "reference_logprobs",
    "float32",
    Layout.per_token,
    "nats, the same under the frozen reference policy; 0 where response_mask is 0",
)
ENTROPIES = Column(
    "entropies",
    "float32",
    Layout.per_token,
    "nats, in steps whose rollouts are dumped, or with loss_fn.top_entropy_quantile: the entropy of the "
    "distribution that token t was drawn from, "
    "as the training engine computes it with prev_logprobs; 0 where response_mask is 0",
)

VALUES = Column(
    "values",
    "float32",
    Layout.per_token,
    "the critic's value of the tokens before token t, in units of the reward; 0 where response_mask is 0",
)
RETURNS = Column(
    "returns",
    "float32",
    Layout.per_token,
    "what the critic's value of the tokens before token t is trained towards; 0 where response_mask is 0",
)
TOKEN_ADVANTAGES = Column(
    "token_advantages",
    "float32",
    Layout.per_token,
    "token t's own advantage, by GAE, not whitened; 0 where response_mask is 0",
)

TEACHER_LOGPROBS = Column(
    "teacher_logprobs",
    "float32",
    Layout.per_token,
    "nats, the same under the teacher of the sample's task; 0 where response_mask is 0",
)
TEACHER_TOPK_IDS = "teacher_topk_ids"
TEACHER_TOPK_LOGPROBS = "teacher_topk_logprobs"


def teacher_topk_columns(k: int) -> tuple[Column, Column]:
    """Return two columns [T, k] of the k tokens that the teacher finds most likely at each position: their
    ids, most likely first, and their log-probs, nats. Both are 0 where response_mask is 0."""
    return (
        Column(
            TEACHER_TOPK_IDS,
            "int32",
            Layout.per_token,
            "ids of the tokens that the teacher finds most likely, the most likely first",
            inner_shape=(k,),
        ),
        Column(
            TEACHER_TOPK_LOGPROBS,
            "float32",
            Layout.per_token,
            "nats, the teacher's log-probs of these tokens",
            inner_shape=(k,),
        ),
    )


PIXEL_VALUES = Column(
    "pixel_values",
    "",
    Layout.ragged,
    "for each image of the prompt its patches as the model reads them, [patches, values of a patch] float32",
    per_prompt=True,
)
IMAGE_GRIDS = Column(
    "image_grid_thw",
    "",
    Layout.ragged,
    "for each image of the prompt its numbers of patches in time, height and width, [3] int64",
    per_prompt=True,
)

OBSERVED_PIXEL_VALUES = Column(
    "observed_pixel_values",
    "",
    Layout.ragged,
    "as pixel_values, for each image of the sample's observations",
)
OBSERVED_IMAGE_GRIDS = Column(
    "observed_image_grid_thw",
    "",
    Layout.ragged,
    "as image_grid_thw, for each image of the sample's observations",
)

MESSAGES = Column(
    "messages",
    "",
    Layout.objects,
    "the sample's conversation: a list of mappings with role and content, as in records",
)

PARENT_GAPS = Column(
    "parent_gaps",
    "int32",
    Layout.per_token,
    "with agents: how many tokens lie between a token and the one that it follows in its session; all that "
    "come before it where it follows none",
)

MESSAGE_FLAGS = Column(
    "message_flags",
    "uint8",
    Layout.per_token,
    "with loss_fn.invalid_tool_call_advantage or loss_fn.malformed_thinking_advantage: what is wrong with "
    "the response that token t is of, the sum of 1 for a tool call that cannot be read and 2 for malformed "
    "thinking; 0 on tokens of prompts and observations",
)

ROLLOUT_COLUMNS = (INPUT_IDS, RESPONSE_MASK, GENERATION_LOGPROBS)
# The columns of runs whose model has a vision tower: first a prompt's images, then its observations'.
IMAGE_COLUMNS = (PIXEL_VALUES, IMAGE_GRIDS, OBSERVED_PIXEL_VALUES, OBSERVED_IMAGE_GRIDS)
POLICY_COLUMNS = (PREV_LOGPROBS, REFERENCE_LOGPROBS)
VALUE_COLUMNS = (VALUES, RETURNS, TOKEN_ADVANTAGES)


def bytes_per_token(columns: Iterable[Column]) -> int:
    """Return how many bytes one token takes in all per_token columns together."""
    return sum(
        math.prod(column.inner_shape) * _bytes_of(column.dtype)
        for column in columns
        if column.layout is Layout.per_token
    )


def _bytes_of(dtype: str) -> int:
    return 1 if dtype == "bool" else int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8


class ColumnError(ValueError):
    """The parts of a run disagree on a column: two write it, or a part reads it that no part writes so.

    The message names the column and the parts.
    """


@dataclass(frozen=True, slots=True)
class Declaration:
    """The columns that one part of a run writes and reads.

    ``part`` is the part's name in messages: its configuration key where it has one. Parts whose names agree
    up to the first dot, such as two environments, are alternatives: a sample comes through only one of them,
    so both may write the same column. ``trains`` says whether samples for training, and not only for
    validation, come through this part.
    """

    part: str
    writes: tuple[Column, ...] = ()
    reads: tuple[Column, ...] = ()
    trains: bool = True


def writes(*columns: Column) -> Callable[[T], T]:
    """Mark an environment's class, or a reward function, as the writer of these columns.

    Raises ValueError for a bfloat16 column, because numpy has no such dtype.
    """
    for column in columns:
        if getattr(column, "dtype", "") == "bfloat16":
            raise ValueError(f"column {column.name!r}: numpy has no bfloat16; declare float32")
    return _marked("columns_written", columns)


def reads(*columns: Column) -> Callable[[T], T]:
    """Mark a user's own loss as a reader of these columns."""
    return _marked("columns_read", columns)


def reads_by_arguments(choose: Callable[..., tuple[Column, ...]]) -> Callable[[T], T]:
    """Mark a loss that reads other columns for other arguments: ``choose(**arguments)`` returns them.

    It gets the arguments that the configuration gives to the loss, so its parameters have the loss's
    defaults. It may raise ValueError for arguments that do not fit together.
    """
    return _marked("columns_read", choose)


def writes_by_arguments(choose: Callable[..., tuple[Column, ...]]) -> Callable[[T], T]:
    """Mark a function that makes an environment, which writes other columns for other arguments:
    ``choose(**arguments)`` returns them."""
    return _marked("columns_written", choose)


def _marked(what: str, columns: tuple[Column, ...] | Callable[..., tuple[Column, ...]]) -> Callable[[T], T]:
    def mark(part: T) -> T:
        setattr(part, what, columns)
        return part

    return mark


def declared_by(part: str, code: object, arguments: Mapping[str, Any] | None = None) -> Declaration:
    """Return the columns with which ``writes`` and ``reads`` marked a class, an instance or a function that
    will be called with these ``arguments``.

    Code that was not marked writes and reads nothing. Raises ColumnError when an attribute
    ``columns_written`` or ``columns_read`` is no sequence of columns, and any error of the function given to
    ``reads_by_arguments`` or ``writes_by_arguments``.
    """
    return Declaration(
        part,
        _columns_of(part, code, "columns_written", arguments or {}),
        _columns_of(part, code, "columns_read", arguments or {}),
    )


def _columns_of(part: str, code: object, what: str, arguments: Mapping[str, Any]) -> tuple[Column, ...]:
    marked = getattr(code, what, ())
    if callable(marked):
        marked = marked(**arguments)
    if not isinstance(marked, list | tuple) or not all(isinstance(one, Column) for one in marked):
        raise ColumnError(
            f"{part}: its attribute {what} is {marked!r}, no tuple of Column; set it by @writes or @reads"
        )
    return tuple(marked)


def gather_columns(declarations: Sequence[Declaration]) -> tuple[Column, ...]:
    """Return every column that some part writes, once, with its ``writer`` filled in.

    Raises ColumnError when a column is written twice, except by alternatives with equal declarations (see
    ``Declaration``); when a column is read that nobody writes, or whose writer declares it differently; and
    when a column is read that is written for validation only.
    """
    written: dict[str, Column] = {}
    for declaration in declarations:
        for column in declaration.writes:
            known = written.setdefault(column.name, replace(column, writer=declaration.part))
            if known.writer != declaration.part or _count(column, declaration.writes) > 1:
                _check_twice(known, column, declaration.part)
    of_training = {column.name for part in declarations if part.trains for column in part.writes}
    for declaration in declarations:
        for column in declaration.reads:
            _check_read(column, declaration.part, written)
            if column.name not in of_training:
                raise ColumnError(
                    f"column {column.name!r} is read by {declaration.part}, and "
                    f"{written[column.name].writer}, which writes it, is for validation only"
                )
    return tuple(written.values())


def _count(column: Column, columns: Iterable[Column]) -> int:
    return sum(one.name == column.name for one in columns)


def _check_twice(known: Column, column: Column, part: str) -> None:
    are_beside = known.writer != part and known.writer.partition(".")[0] == part.partition(".")[0]
    if not are_beside:
        raise ColumnError(
            f"column {column.name!r} is written by {known.writer} and by {part}; rename one of the two"
        )
    if known != column:
        raise ColumnError(
            f"column {column.name!r} is written by {known.writer} as {_shown(known)} and by {part} as "
            f"{_shown(column)}; declare it alike, or rename one of the two"
        )


def _check_read(column: Column, part: str, written: dict[str, Column]) -> None:
    known = written.get(column.name)
    if known is None:
        raise ColumnError(
            f"column {column.name!r} is read by {part}, and nobody writes it; written are "
            f"{', '.join(sorted(written))}"
        )
    if known != column:
        raise ColumnError(
            f"column {column.name!r} is read by {part} as {_shown(column)}, but {known.writer} writes it as "
            f"{_shown(known)}; declare it alike"
        )


def _shown(column: Column) -> str:
    parts = [column.layout.value, column.dtype + str(list(column.inner_shape)) * bool(column.inner_shape)]
    return " ".join([*filter(None, parts), *(["once per prompt"] if column.per_prompt else [])])
