"""A model's outputs and gradients on rows that are forests: those of every path by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.algorithms.generalised_advantages import generalised_advantages
from nemo_like.batch.forest import ROOT, Forest
from nemo_like.batch.meta import MicroBatch, MicroBatchLayout, Schedule
from nemo_like.policy.batch.forest_attention import ForestAttention
from nemo_like.policy.batch.policy_batch import PolicyBatch
from tests.unit.batch.forests import forest_from, forests, path_of

VOCABULARY, HEADS, GROUPS, HEAD_SIZE, LONGEST = 11, 2, 1, 4, 64
HIDDEN = HEADS * HEAD_SIZE
SHAPES = {
    "embedding": (VOCABULARY, HIDDEN),
    "position": (LONGEST, HIDDEN),
    "query": (HIDDEN, HEADS * HEAD_SIZE),
    "key": (HIDDEN, GROUPS * HEAD_SIZE),
    "value": (HIDDEN, GROUPS * HEAD_SIZE),
    "head": (HIDDEN, VOCABULARY),
}


@dataclass(frozen=True)
class Drawn:
    """Samples, of which some begin with tokens of the one before."""

    samples: list[Forest]
    ids: list[list[int]]
    masks: list[list[int]]
    shared: list[int]

    @property
    def batch(self) -> PolicyBatch:
        gaps = [[token - 1 - parent for token, parent in enumerate(one.parents())] for one in self.samples]
        columns = {
            "input_ids": np.concatenate(self.ids).astype(np.int32),
            "response_mask": np.concatenate(self.masks).astype(np.uint8),
            "parent_gaps": np.concatenate(gaps).astype(np.int32),
        }
        lengths = [one.num_tokens for one in self.samples]
        return PolicyBatch(columns, lengths, {}, torch.device("cpu"))


@st.composite
def samples(draw: st.DrawFn) -> Drawn:
    """Lone samples and sessions, with responses or without; runs may have one token."""
    drawn = Drawn([], [], [], [])
    for number in range(draw(st.integers(1, 4))):
        forest = draw(forests(max_runs=draw(st.sampled_from([1, 6]))))
        count, first = forest.num_tokens, forest.runs[0].length
        ids = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=count, max_size=count))
        shared = 0
        if number:
            most = min(first, drawn.samples[-1].runs[0].length, max(1, drawn.samples[-1].num_tokens - 1))
            shared = draw(st.integers(0, min(most, max(1, count - 1))))
            ids[:shared] = drawn.ids[-1][:shared]
            drawn.masks[-1][:shared] = [0] * shared
        mask = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
        parents = forest.parents()
        mask = [one if token >= shared and parents[token] != ROOT else 0 for token, one in enumerate(mask)]
        drawn.samples.append(forest)
        drawn.ids.append(ids)
        drawn.masks.append(mask)
        drawn.shared.append(shared)
    return drawn


def weights() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in SHAPES.items()
    }


def logits(model: dict[str, Tensor], ids: Tensor, positions: Tensor, forest: Forest) -> Tensor:
    """One layer of attention on a row of tokens, [T, vocabulary]."""
    hidden = model["embedding"][ids] + model["position"][positions]
    heads = [(hidden @ model[name]).unflatten(-1, (-1, HEAD_SIZE)) for name in ("query", "key", "value")]
    attended = ForestAttention(forest, len(ids)).attend(*heads, None)
    return (hidden + attended.flatten(1)) @ model["head"]


def row_by_row(model: dict[str, Tensor], drawn: Drawn) -> tuple[Tensor, list[int]]:
    """The log-probs of the scored tokens of the samples in one row, and their places in the batch."""
    lengths = [one.num_tokens for one in drawn.samples]
    spec = MicroBatch(tuple(range(len(lengths))), sum(lengths) + 1, tuple(drawn.shared))
    inputs = drawn.batch.micro_batch(spec, Schedule((), MicroBatchLayout.packed))
    assert inputs.forest is not None
    used = inputs.forest.num_tokens
    ids, positions = inputs.input_ids[0, :used], inputs.position_ids[0, :used]
    scores = logits(model, ids, positions, inputs.forest).log_softmax(-1)[inputs.output_index]
    return scores.gather(1, inputs.token_ids[:, None])[:, 0], inputs.packed_index.tolist()


def path_by_path(model: dict[str, Tensor], drawn: Drawn) -> dict[int, Tensor]:
    """The same of each token from its path alone."""
    found: dict[int, Tensor] = {}
    first = 0
    for forest, ids, mask in zip(drawn.samples, drawn.ids, drawn.masks, strict=True):
        parents = forest.parents()
        for token in np.flatnonzero(mask).tolist():
            path = path_of(parents[token], parents)
            alone = forest_from(range(ROOT, len(path) - 1))
            row = torch.tensor([ids[one] for one in path])
            scores = logits(model, row, torch.arange(len(path)), alone)[-1].log_softmax(-1)
            found[first + token] = scores[ids[token]]
        first += forest.num_tokens
    return found


@given(samples())
def test_log_probs_and_gradients_are_those_of_every_path_alone(drawn: Drawn) -> None:
    model, alone = weights(), weights()
    scored, tokens = row_by_row(model, drawn)
    expected = path_by_path(alone, drawn)
    assert sorted(tokens) == sorted(expected)
    if not tokens:
        return
    wanted = torch.stack([expected[token] for token in tokens])
    torch.testing.assert_close(scored, wanted)
    weights_of_loss = torch.arange(1.0, len(tokens) + 1, dtype=torch.float64)
    (scored * weights_of_loss).sum().backward()
    (wanted * weights_of_loss).sum().backward()
    for name, weight in model.items():
        torch.testing.assert_close(weight.grad, alone[name].grad)


@given(samples(), st.floats(0, 1), st.floats(0, 1))
def test_advantages_are_those_along_the_run_that_trains_a_token(
    drawn: Drawn, gamma: float, gae_lambda: float
) -> None:
    batch = drawn.batch
    rng = np.random.default_rng(2)
    values, rewards = (torch.tensor(rng.normal(size=batch.num_tokens)) for _ in range(2))
    ends = torch.tensor(rng.normal(size=len(batch.runs)))
    mask = batch.columns["response_mask"]
    settings: dict[str, Any] = {"gamma": gamma, "gae_lambda": gae_lambda}
    found = generalised_advantages(values, rewards, mask, batch.runs.lengths, ends, **settings).advantages
    expected, start = torch.zeros(batch.num_tokens), 0
    for run, length in enumerate(batch.runs.lengths.tolist()):
        following, advantage = float(ends[run]), 0.0
        for token in reversed(range(start, start + length)):
            if mask[token]:
                delta = float(rewards[token]) + gamma * following - float(values[token])
                advantage = delta + gamma * gae_lambda * advantage
                expected[token], following = advantage, float(values[token])
        start += length
    torch.testing.assert_close(found, expected)
