"""The keys of rollouts, ``rollout``: dumps, recordings, replays and journals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nemo_like.config.keys import Key


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Which files rollouts write, and two special runs: ``replay`` needs no engines, ``generate_only`` trains
    nothing."""

    dump_period: Annotated[
        int,
        Key(
            "write all samples to RUN_DIR/rollouts/step_N.jsonl, for people to read, every so many steps; "
            "0: never",
            0,
        ),
    ]
    dump_validation: Annotated[
        bool, Key("write RUN_DIR/rollouts/validation_N.jsonl, the same of every validation", False)
    ]
    excerpt_period: Annotated[
        int,
        Key(
            "every so many steps, write a few whole groups to RUN_DIR/rollouts/step_N.jsonl, unless "
            "dump_period writes all; 0: never",
            10,
            at_least=0,
        ),
    ]
    excerpt_samples: Annotated[int, Key("the most samples of such a step", 32, at_least=1)]
    excerpt_validation_samples: Annotated[
        int,
        Key(
            "the most answers of each validation in RUN_DIR/rollouts/validation_N.jsonl, unless "
            "dump_validation writes all; 0: none",
            64,
            at_least=0,
        ),
    ]
    record: Annotated[bool, Key("keep every training rollout in RUN_DIR/recorded, for a later replay", False)]
    record_times: Annotated[
        bool,
        Key(
            "Write RUN_DIR/rollout_times.jsonl: when each sample was asked for and came, some "
            "20 bytes per turn. With it `run_grpo.py --what-if` predicts how long steps would "
            "take with other settings (docs/how_to/what_if.md).",
            True,
        ),
    ]
    replay: Annotated[
        str | None,
        Key(
            "another run's RUN_DIR/recorded: train from its rollouts, without generation engines",
            None,
            is_path=True,
        ),
    ]
    generate_only: Annotated[
        bool, Key("sample and reward, but train nothing: there are no policy workers", False)
    ]
    keep_messages: Annotated[
        bool,
        Key(
            "keep the conversation of every sample as the column `messages`, see docs/reference/columns.md",
            False,
        ),
    ]
    max_tokens_per_step: Annotated[
        int | None,
        Key(
            "With grpo.max_staleness above 0: tokens that a sample may generate in each step "
            "that its rollout is ahead of its own. One that needs more goes on in the next "
            "step, with its tokens kept (docs/explanation/async.md). null: no limit",
            None,
            at_least=1,
        ),
    ]
    no_reward_for: Annotated[
        list[str],
        Key(
            "What takes a sample its reward, which becomes 0, where a response of it has it: "
            "invalid_tool_call, malformed_thinking, repeated_thinking, or empty_answer of its last response.",
            [],
        ),
    ]
    tool_call_marks: Annotated[
        list[str],
        Key(
            "texts with which tool calls begin or end; a response that has one left has an invalid call",
            ["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"],
        ),
    ]
    thinking_marks: Annotated[
        list[str], Key("the texts with which a thought begins and ends", ["<think>", "</think>"])
    ]
    journal: Annotated[
        bool,
        Key(
            "Where metrics depend on timing (grpo.overlap=exact, grpo.max_staleness above 0), "
            "write to RUN_DIR/journal what happened when. A run that is killed and continued "
            "follows its own journal, and has the metrics of one that was not.",
            True,
        ),
    ]
    follow_journal: Annotated[
        str | None,
        Key(
            "another run's RUN_DIR: do things in the order of its journal, with the same metrics",
            None,
            is_path=True,
        ),
    ]


# The folder of a run's directory that has its journal.
JOURNAL_FOLDER = "journal"
# The key of a dumped sample that says how many samples its step had, where the file has an excerpt of them.
EXCERPT_OF = "excerpt_of"


def dumps_all_of(step: int, cfg: RolloutConfig) -> bool:
    """Return whether to dump every sample of training step ``step``."""
    return cfg.dump_period > 0 and step % cfg.dump_period == 0


def dumps_rollouts_of(step: int, cfg: RolloutConfig) -> bool:
    """Return whether to dump samples of training step ``step``, all of them or an excerpt.

    A replay has no conversations to dump.
    """
    has_excerpt = cfg.excerpt_period > 0 and step % cfg.excerpt_period == 0 and cfg.replay is None
    return has_excerpt or dumps_all_of(step, cfg)
