from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nemo_like.configuration import Config, load_config
from nemo_like.mismatch.past_run import past_sample
from scripts.demo_model.tiny_tokenizer import save_tokenizer

ROOT = Path(__file__).parents[3]
SAMPLE = {
    "prompt": "1+2=",
    "tokens": {"text": ["3", "<eos>"], "generation_logprobs": [-0.5, None]},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps with samples, and a checkpoint after the first."""
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2, 3):
        (tmp_path / "rollouts" / f"step_{step}.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)
    save_tokenizer(tmp_path / "model")
    return tmp_path


def configured(run: Path) -> Config:
    return load_config(ROOT / "configs/grpo_cpu.yaml", [f"policy.model_name='{run / 'model'}'"])


def rewrite(run: Path, **changes: object) -> None:
    (run / "rollouts" / "step_2.jsonl").write_text(json.dumps(SAMPLE | changes) + "\n")


def test_a_step_was_sampled_by_the_checkpoint_of_the_step_before(run: Path) -> None:
    sample = past_sample(run, configured(run), None, 0)
    assert (sample.name, sample.version, sample.has_its_weights) == ("sample 0 of step 2", 1, True)
    assert sample.checkpoint == run / "checkpoints" / "step_1" / "policy"
    assert len(sample.token_ids) == 6
    # Of the prompt's tokens but the first, then of the answer's.
    np.testing.assert_array_equal(sample.reported, np.array([np.nan] * 3 + [-0.5, np.nan], np.float32))


def test_the_first_step_was_sampled_by_the_model_that_the_run_began_with(run: Path) -> None:
    sample = past_sample(run, configured(run), 1, 0)
    assert (sample.version, sample.checkpoint, sample.has_its_weights) == (0, None, True)


def test_log_probs_of_other_weights_are_not_compared(run: Path) -> None:
    sample = past_sample(run, configured(run), 3, 0)
    assert (sample.version, sample.has_its_weights) == (1, False)
    assert np.isnan(sample.reported).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": "[user] 1+2="}, "cannot be told from their texts"),
        (
            {"tokens": {"text": ["no token"], "generation_logprobs": [-1.0]}},
            "cannot be told from their texts",
        ),
        ({"tokens": {}}, "has images, or no tokens"),
        ({"images": ["a.png"]}, "has images, or no tokens"),
    ],
)
def test_a_sample_whose_tokens_are_not_known_is_refused(
    run: Path, changes: dict[str, object], said: str
) -> None:
    rewrite(run, **changes)
    with pytest.raises(ValueError, match=said):
        past_sample(run, configured(run), 2, 0)


def test_what_the_run_does_not_have_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--step 7: .* it has those of steps 1, 2, 3"):
        past_sample(run, configured(run), 7, 0)
    with pytest.raises(ValueError, match="--sample 1: step 2 has samples 0 to 0"):
        past_sample(run, configured(run), 2, 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no samples .* rollout\.record=true"):
        past_sample(tmp_path / "empty", configured(run), None, 0)
