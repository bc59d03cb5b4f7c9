"""What the search says of sampling settings and of weights that did not come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from nemo_like.mismatch.search import NOTHING
from tests.functional.generation_fixtures import make_checkpoint
from tests.functional.mismatch_pairs import SAMPLING, Pair, config, parties_of, planted

pytestmark = [pytest.mark.timeout(600), pytest.mark.engine]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Qwen3 of two layers, by FSDP."""
    path = tmp_path_factory.mktemp("qwen3")
    cfg = config(make_checkpoint(path / "model", tied=True), "policy.backend=fsdp")
    with parties_of(cfg, path) as parties:
        yield Pair(cfg, parties)


def test_a_setting_of_the_sampling_that_the_trainer_does_not_apply_is_named(pair: Pair) -> None:
    found = pair.find(replace(SAMPLING, top_k=3))
    assert found.sentences == [f"{NOTHING}; the sampling settings do: top_k"]
    assert pair.find(replace(SAMPLING, temperature=0.5)).sentences[0].endswith("do: temperature")


def test_weights_that_did_not_come_are_told_with_their_version(pair: Pair) -> None:
    pair.train()
    version = pair.version
    assert pair.find().sentences == [
        f"every weight: the engine has the weight that it had at version {version - 1}, "
        f"the trainer is at {version}"
    ]
    name = "model.layers.1.self_attn.o_proj.weight"
    with planted(pair, "stale", name):
        pair.push()
        assert pair.find().sentences == [NOTHING]
        pair.train()
        pair.push()
        found = pair.find()
    assert found.sentences == [
        f"layers.1.self_attn.o_proj: the engine has the weight that it had at version {version}, "
        f"the trainer is at {version + 1}"
    ]
    pair.push()
    assert pair.find().sentences == [NOTHING]
