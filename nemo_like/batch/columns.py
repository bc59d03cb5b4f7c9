"""Every column of the data plane, declared once: name, dtype, shape per sample, producer, consumers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Layout(Enum):
    """Shape of one sample's value; T is the sample's own length (prompt and response)."""

    per_token = "per_token"  # [T, *inner]: a batch is one array [sum of T, *inner], lengths are the meta's
    per_sample = "per_sample"  # [*inner]: a batch is one array [N, *inner]
    ragged = "ragged"  # any number of arrays or torch tensors, each of any shape and dtype
    objects = "objects"  # an arbitrary Python object


@dataclass(frozen=True, slots=True)
class Column:
    """One declared column.

    ``dtype`` is the numpy name of the dtype, the narrowest that is exact; "bfloat16" columns are
    torch tensors, since numpy has no such dtype. ragged and objects columns carry dtypes of their
    own and declare "".
    """

    name: str
    dtype: str
    layout: Layout
    producer: str
    consumers: tuple[str, ...]
    description: str
    inner_shape: tuple[int, ...] = ()


INPUT_IDS = Column(
    "input_ids",
    "int32",
    Layout.per_token,
    "rollout",
    ("logprobs", "train"),
    "token ids of prompt and response",
)
RESPONSE_MASK = Column(
    "response_mask",
    "uint8",
    Layout.per_token,
    "rollout",
    ("logprobs", "train"),
    "1 on tokens the policy generated, 0 on prompt, tool and environment tokens",
)
GENERATION_LOGPROBS = Column(
    "generation_logprobs",
    "float32",
    Layout.per_token,
    "rollout",
    ("logprobs", "train"),
    "nats, log p(token t | tokens before t) as the generation engine sampled it; 0 where response_mask is 0",
)
PREV_LOGPROBS = Column(
    "prev_logprobs",
    "float32",
    Layout.per_token,
    "policy",
    ("logprobs", "train"),
    "nats, the same under the training engine's weights before the step; 0 where response_mask is 0",
)
REFERENCE_LOGPROBS = Column(
    "reference_logprobs",
    "float32",
    Layout.per_token,
    "policy",
    ("train",),
    "nats, the same under the frozen reference policy; 0 where response_mask is 0",
)

ROLLOUT_COLUMNS = (INPUT_IDS, RESPONSE_MASK, GENERATION_LOGPROBS)
POLICY_COLUMNS = (PREV_LOGPROBS, REFERENCE_LOGPROBS)
