"""What an engine says of given tokens, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.cluster.actor_errors import ActorFailed
from nemo_like.cluster.cluster import Cluster
from nemo_like.generation.prompt_scores import PromptScores
from tests.functional.generation_fixtures import (
    MAX_LENGTH,
    TIMEOUT_S,
    VOCAB_SIZE,
    engine_spec,
    make_checkpoint,
)

# The first test also waits for the engine.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nobody_dies")]

# The shortest, those around the blocks of 32 tokens of the KV cache, the longest, and one of them twice.
LENGTHS = (1, 2, 31, 32, 33, 64, MAX_LENGTH - 1, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("teacher"), tied=True)


class Teacher:
    """An engine that only scores."""

    def __init__(self, cluster: Cluster, checkpoint: Path) -> None:
        self._cluster = cluster
        self._engine = cluster.start(engine_spec(checkpoint, "teacher", max_num_seqs=4))

    def call(self, method: str, *args: Any) -> Any:
        call = self._engine.submit(method, *args)
        return self._cluster.gather([call], stage="test", timeout_s=TIMEOUT_S)[0]

    def score(self, sequences: list[list[int]], top_k: int) -> PromptScores:
        return self.call("score", sequences, top_k)


@pytest.fixture(scope="module")
def teacher(private_ray: None, checkpoint: Path) -> Iterator[Teacher]:
    cluster = Cluster()
    try:
        yield Teacher(cluster, checkpoint)
    finally:
        cluster.stop()


def some_sequences() -> list[list[int]]:
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, VOCAB_SIZE, size=length).tolist() for length in LENGTHS]
    return [*sequences[:-1], sequences[1]]


@pytest.mark.parametrize("top_k", [0, 5, VOCAB_SIZE])
def test_scores_are_those_of_transformers(teacher: Teacher, checkpoint: Path, top_k: int) -> None:
    sequences = some_sequences()
    scores = teacher.score(sequences, top_k)
    assert (scores.logprobs.dtype, scores.topk_logprobs.dtype) == (np.float32, np.float32)
    assert scores.topk_ids.dtype == np.int32
    assert len(scores.logprobs) == sum(LENGTHS)
    assert scores.topk_ids.shape == scores.topk_logprobs.shape == (sum(LENGTHS), top_k)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    start = 0
    for sequence in sequences:
        with torch.no_grad():
            expected = model(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1).numpy()
        mine = slice(start + 1, start + len(sequence))
        places = np.arange(len(sequence) - 1)
        np.testing.assert_allclose(scores.logprobs[mine], expected[places, sequence[1:]], atol=1e-4)
        likely = np.argsort(-expected, axis=1)[:, :top_k]
        np.testing.assert_array_equal(scores.topk_ids[mine], likely)
        np.testing.assert_allclose(
            scores.topk_logprobs[mine], np.take_along_axis(expected, likely, axis=1), atol=1e-4
        )
        assert scores.logprobs[start] == 0
        assert not scores.topk_ids[start].any()
        assert not scores.topk_logprobs[start].any()
        start += len(sequence)


def test_the_same_sequences_have_the_same_scores_again(teacher: Teacher) -> None:
    """Also those whose prefix the engine has computed before."""
    first, again = (teacher.score(some_sequences(), 4) for _ in range(2))
    np.testing.assert_array_equal(first.logprobs, again.logprobs)
    np.testing.assert_array_equal(first.topk_ids, again.topk_ids)
    np.testing.assert_array_equal(first.topk_logprobs, again.topk_logprobs)


def test_no_sequence_has_no_scores(teacher: Teacher) -> None:
    scores = teacher.score([], 3)
    assert scores.logprobs.shape == (0,)
    assert scores.topk_ids.shape == (0, 3)


@pytest.mark.parametrize("wrong", [[], [5] * (MAX_LENGTH + 1)])
def test_a_sequence_that_cannot_be_scored_refuses_all_and_the_engine_goes_on(
    teacher: Teacher, wrong: list[int]
) -> None:
    with pytest.raises(ActorFailed, match=r"ValueError|VLLMValidationError"):
        teacher.score([[4, 5, 6], wrong], 2)
    assert len(teacher.score([[4, 5, 6]], 2).logprobs) == 3
