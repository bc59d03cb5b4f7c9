"""The example of docs/reference/columns.md: an environment that brings three columns, and a loss that reads
two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nemo_like.algorithms.loss_kind import OwnLossConfig
from nemo_like.algorithms.losses import LossTerms, LossTokens, policy_gradient
from nemo_like.batch.columns import Column, Layout, reads, writes
from nemo_like.environments.interface import Feedback, Turn

DESERVED = Column("deserved", "float32", Layout.per_token, "share of the advantage that a token deserves")
LEVEL = Column("level", "float32", Layout.per_sample, "how much the problem counts", per_prompt=True)
NOTES = Column("notes", "", Layout.objects, "what the judge saw")


@writes(DESERVED, LEVEL, NOTES)
class Judge:
    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        return [self._feedback(turn) for turn in turns]

    def _feedback(self, turn: Turn) -> Feedback:
        is_right = turn.response == turn.answer
        columns = {
            "deserved": np.linspace(1.0, 0.5, len(turn.response_ids)),
            "level": 1.0 + str(turn.prompt).count("9"),
            "notes": {"said": turn.response, "is_right": is_right},
        }
        return Feedback({"right": float(is_right)}, columns=columns)


@reads(DESERVED, LEVEL)
def weighted(tokens: LossTokens, cfg: OwnLossConfig) -> LossTerms:
    weights = tokens.columns["deserved"] * tokens.columns["level"][tokens.sample_index]
    tokens = replace(tokens, advantages=tokens.advantages * weights)
    return policy_gradient(tokens, cfg, cfg.ratio_clip_min, cfg.ratio_clip_max, cfg.ratio_clip_c)
