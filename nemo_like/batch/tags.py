"""Every tag of a batch, declared once: its name and type, who writes it and who reads it.

A tag is one small value per sample. It travels in the metadata, so the driver may read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

TagValue = float | int | bool | str
V = TypeVar("V", float, int, bool, str)
T = TypeVar("T", bound=Callable[..., Any])
# The attribute of a function under which ``reads_tags`` stores the tags.
_READS = "tags_read"


@dataclass(frozen=True, slots=True)
class Tag(Generic[V]):
    """One declared tag; ``type`` is the type of its values, where an int may stand for a float."""

    name: str
    type: type[V]
    producer: str
    consumers: tuple[str, ...]
    description: str


GROUP_ID = Tag("group_id", int, "rollout", ("driver",), "the prompt's number within the step")
TASK = Tag(
    "task",
    str,
    "rollout",
    ("driver", "teacher_logprobs"),
    "with teacher.models, in recordings and evaluations: the name of the environment that judges the sample",
)
DIFFICULTY = Tag(
    "difficulty", str, "rollout", ("driver",), "in evaluations: the value of data.*.difficulty_key; or empty"
)
REWARD = Tag("reward", float, "rollout", ("driver",), "as the environment gave it; 0 where it failed")
IS_JUDGED = Tag(
    "is_judged",
    bool,
    "rollout",
    ("driver",),
    "whether its environment gave it a reward; no later stage changes it",
)
SAMPLE_MASK = Tag(
    "sample_mask",
    float,
    "driver",
    ("driver", "logprobs", "train"),
    "0: the sample does not train, for the reason in outcome",
)
NUM_PROMPT_TOKENS = Tag(
    "num_prompt_tokens", int, "rollout", ("driver",), "tokens that the samples of a group have in common"
)
NUM_RESPONSE_TOKENS = Tag(
    "num_response_tokens", int, "rollout", ("driver",), "tokens that the policy generated, of all turns"
)
MAX_RESPONSE_TOKENS = Tag(
    "max_response_tokens",
    int,
    "rollout",
    ("driver",),
    "in training: the most that the policy could have generated, of all turns",
)
NUM_TURNS = Tag("num_turns", int, "rollout", (), "turns of the conversation")
SAMPLE_DIGEST = Tag(
    "sample_digest", int, "rollout", ("train",), "of the token ids; with tripwires, which compare it"
)
IS_TRUNCATED = Tag("is_truncated", bool, "rollout", ("driver",), "whether it ran into a limit of tokens")
POLICY_VERSION = Tag("policy_version", int, "rollout", ("driver",), "of the weights that generated it")
AS_LOADED = -1  # the policy version of engines to which no trainer has sent weights
ANSWER_ID = Tag("answer_id", int, "rollout", ("driver",), "validation: equal for equal answers of a group")
SCALED_REWARD = Tag("scaled_reward", float, "driver", (), "the reward after grpo.reward_scaling")
SHAPED_REWARD = Tag("shaped_reward", float, "driver", ("driver",), "and after grpo.reward_shaping")
OUTCOME = Tag("outcome", str, "driver", ("driver",), "whether it trained, and if not, why")
MULT_PROB_ERROR = Tag(
    "mult_prob_error", float, "logprobs", ("driver",), "mean of exp|engine - trainer| over its tokens"
)
KL_SUM = Tag(
    "kl_to_go_sum", float, "logprobs", ("driver",), "with a KL in the reward: the KL to go, over its tokens"
)
KL_SQUARE_SUM = Tag("kl_to_go_square_sum", float, "logprobs", ("driver",), "and its square")
ADVANTAGE = Tag("advantage", float, "driver", ("driver", "train"), "of every token of the response")
ADVANTAGE_DIGEST = Tag(
    "advantage_digest", int, "driver", ("train",), "of sample_digest and advantage, which tripwires compare"
)
KL_SCALE = Tag(
    "kl_scale", float, "driver", ("train",), "the multiple of the KL to go that a token's advantage loses"
)
TOKEN_ADVANTAGE_SUM = Tag(
    "token_advantage_sum", float, "values", ("driver",), "with a critic: GAE advantages, over its tokens"
)
TOKEN_ADVANTAGE_SQUARE_SUM = Tag(
    "token_advantage_square_sum", float, "values", ("driver",), "and their squares"
)
TOKEN_SCALE = Tag(
    "token_scale",
    float,
    "driver",
    ("train",),
    "the multiple of column token_advantages that a token's advantage gains",
)
LIKELIHOOD_WEIGHT = Tag(
    "likelihood_weight",
    float,
    "driver",
    ("train",),
    "the weight of each token's log-prob in the likelihood of its update's right answers",
)
ENTROPY_COEF = Tag(
    "entropy_coef",
    float,
    "driver",
    ("train",),
    "with loss_fn.entropy_target: the entropy bonus's coefficient in this step",
)
IS_IDLE = Tag("is_idle", bool, "driver", ("driver",), "whether it has no gradient and need not be computed")


def reward_component(name: str) -> Tag[float]:
    """Return the tag of a named part of the reward."""
    return Tag(f"reward/{name}", float, "rollout", ("driver",), "a part of the reward, NaN where it abstains")


def reads_tags(*tags: Tag[Any]) -> Callable[[T], T]:
    """Mark a user's own estimator or filter as a reader of these tags, which it finds by name in ``tags``."""

    def mark(function: T) -> T:
        setattr(function, _READS, tags)
        return function

    return mark


def tags_read_by(function: Any) -> tuple[Tag[Any], ...]:
    """Return the tags that ``reads_tags`` marked a function with; () for an unmarked function.

    Raises ValueError when the mark is no sequence of tags.
    """
    marked = getattr(function, _READS, ())
    if not isinstance(marked, list | tuple) or not all(isinstance(one, Tag) for one in marked):
        raise ValueError(f"its attribute {_READS} is {marked!r}, no tuple of Tag; set it by @reads_tags")
    return tuple(marked)


def by_tag_name(values: dict[Tag[Any], Any]) -> dict[str, Any]:
    """Return the same dictionary with each tag's name in place of the tag."""
    return {tag.name: of_tag for tag, of_tag in values.items()}
