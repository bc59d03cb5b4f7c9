"""Digests beside a checkpoint, vectors read back from it, and copies of weights on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.policy.loss.update_watch import WeightCopies
from nemo_like.policy.loss.updated_tensors import UpdatedTensor
from nemo_like.policy.workers.saved_digests import read_digests, state_digests, write_digests
from nemo_like.policy.workers.stored_weights import check_stored, unlike_stored, vectors
from nemo_like.policy.workers.weight_copies import copy_sums, digest_slots, num_unequal

NORM = torch.arange(6.0)
WEIGHTS = [("0.decoder.final_layernorm.weight", NORM), ("0.decoder.matrix", torch.ones(2, 3))]
STATE = {"step": torch.ones(()), "exp_avg": torch.ones(6), "exp_avg_sq": torch.zeros(6)}
UPDATED = [UpdatedTensor(name="norm", weight=NORM, is_matrix=False, group={}, state=STATE)]
PAIR = ParallelLayout(tp=1, cp=1, dp=2, pp=1)


def test_digests_are_those_of_a_rank_of_one_layout(tmp_path: Path) -> None:
    digests = state_digests(WEIGHTS, UPDATED)
    assert [*digests][2:] == ["moment exp_avg of norm", "moment exp_avg_sq of norm"]
    write_digests(tmp_path, PAIR.coordinates(1), digests)
    assert read_digests(tmp_path, PAIR.coordinates(1)) == digests
    assert read_digests(tmp_path, PAIR.coordinates(0)) is None
    other = ParallelLayout(tp=2, cp=1, dp=1, pp=1)
    assert read_digests(tmp_path, other.coordinates(1)) is None


def test_a_moment_that_was_rounded_has_another_digest() -> None:
    rounded = [UPDATED[0], *UPDATED[1:]]
    before = state_digests(WEIGHTS, rounded)
    STATE["exp_avg"].mul_(1 + 2**-20)
    after = state_digests(WEIGHTS, rounded)
    STATE["exp_avg"].fill_(1.0)
    assert [name for name in before if before[name] != after[name]] == ["moment exp_avg of norm"]


@pytest.mark.parametrize("prefix", ["", "model.0."])
def test_a_checkpoint_with_other_weights_than_the_live_ones_is_refused(tmp_path: Path, prefix: str) -> None:
    state = {f"{prefix}decoder.final_layernorm.weight": NORM}
    torch_checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    live = vectors(WEIGHTS)
    assert [*live] == ["0.decoder.final_layernorm.weight"]
    check_stored(tmp_path, live)
    for part in (NORM[:4], NORM[4:]):  # of two ranks
        check_stored(tmp_path, {"0.decoder.final_layernorm.weight": part})
    with pytest.raises(RuntimeError, match=r"'stored_weights'.*0\.decoder\.final_layernorm\.weight"):
        check_stored(tmp_path, {name: one + 1 for name, one in live.items()})


def test_weights_that_a_checkpoint_does_not_name_are_not_judged(tmp_path: Path) -> None:
    torch_checkpoint.save({"other": NORM}, checkpoint_id=tmp_path, no_dist=True)
    assert unlike_stored(tmp_path, {"0.decoder.layers.0.norm": NORM}) == []


def slots_of_two(first: torch.Tensor, second: torch.Tensor, first_ranks: tuple[int, int]) -> list[float]:
    """The greatest of what two ranks exchange, whose copies begin at these ranks."""
    parts = [
        digest_slots(copy_sums([WeightCopies(rank, [("norm", one)])]), 2)
        for one, rank in zip((first, second), first_ranks, strict=True)
    ]
    return [max(pair) for pair in zip(*parts, strict=True)]


def test_copies_on_several_ranks_are_equal_to_the_bit() -> None:
    assert num_unequal(slots_of_two(NORM, NORM.clone(), (0, 0))) == 0
    assert num_unequal(slots_of_two(NORM, NORM * (1 + 2**-20), (0, 0))) == 1


def test_ranks_with_other_parts_are_not_compared() -> None:
    assert num_unequal(slots_of_two(NORM, NORM + 1, (0, 1))) == 0
