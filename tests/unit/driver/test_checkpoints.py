from __future__ import annotations

from nemo_like.driver.checkpoints import RunPosition


def test_a_step_counts_every_rollout_it_needed() -> None:
    metrics = {"train/dynamic_sampling_num_gen_batches": 3.0, "train/global_valid_toks": 70.0}
    before = RunPosition(step=4, policy_version=4, consumed_samples=100, valid_tokens=900)
    after = before.after(5, 5, metrics, num_samples=16)
    assert after == RunPosition(step=5, policy_version=5, consumed_samples=148, valid_tokens=970)
