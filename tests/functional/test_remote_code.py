"""Models of a type that neither transformers nor vLLM knows train: by the code that their checkpoint brings,
or by a library that processes import first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.algorithms.options import LossConfig
from nemo_like.cluster.coordinates import Coordinates, ParallelLayout
from nemo_like.models.remote_code import allowing_code
from nemo_like.policy.options import PolicyConfig
from tests.functional.dense_reference import DenseReference
from tests.functional.halved_checkpoints import halved_checkpoint
from tests.functional.halved_llama import HalvedForCausalLM
from tests.functional.matrix_of_runs import judged_by
from tests.functional.policy_fixtures import VOCAB_SIZE, loss_config, policy_config, random_batch
from tests.functional.runs import FEWEST_PROCESSES, run_grpo
from tests.functional.test_fsdp_models import NUM_SAMPLES, TEMPERATURE, ModelReport, score_and_train
from tests.functional.worlds import run_world

LIBRARY = "tests.functional.halved_library"


class HalvedReference(DenseReference):
    loader = HalvedForCausalLM


def in_process_of_run(
    coordinates: Coordinates, cfg: PolicyConfig, loss: LossConfig, batch: dict[str, Any]
) -> ModelReport:
    """In a process of its own, which is told of code as an actor is."""
    with allowing_code(cfg):
        return score_and_train(coordinates, {"halved": cfg}, loss, batch)["halved"]


@pytest.mark.parametrize("with_code", [True, False], ids=["trust_remote_code", "external_lib"])
def test_an_update_equals_the_dense_models(with_code: bool, tmp_path: Path) -> None:
    checkpoint = halved_checkpoint(tmp_path / "checkpoint", with_code=with_code, vocab_size=VOCAB_SIZE)
    allowed = {"trust_remote_code": True} if with_code else {"external_lib": [LIBRARY]}
    cfg: PolicyConfig = replace(policy_config(checkpoint, backend="fsdp"), **allowed)
    batch, layout = random_batch(NUM_SAMPLES), ParallelLayout(tp=1, cp=1, dp=1, pp=1)
    report = run_world(in_process_of_run, layout, cfg, loss_config(), batch)[0]
    dense = HalvedReference(cfg, loss_config(), TEMPERATURE)
    prev = [logprobs.detach() for logprobs in dense.logprobs(batch)]
    torch.testing.assert_close(report.logprobs, torch.cat(prev), rtol=0, atol=1e-5)
    update = dense.update(batch, list(range(NUM_SAMPLES)), prev, None, report.metrics["lr"])
    assert report.metrics["loss"] == pytest.approx(update.loss, abs=1e-5)
    assert report.metrics["grad_norm"] == pytest.approx(update.grad_norm, rel=1e-4)
    assert (tmp_path / "export" / "halved_llama.py").is_file() == with_code
    exported = HalvedForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for key, weight in dense.model.state_dict().items():
        torch.testing.assert_close(exported[key], weight, rtol=0, atol=1e-4, msg=key)


STEPS = (
    *("grpo.max_num_steps=2", "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4"),
    *("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0"),
    *("policy=fsdp", "policy.train_global_batch_size=16", "policy.scheduler.warmup_updates=0"),
    *(*judged_by("arithmetic"), *FEWEST_PROCESSES),
)


TRUST = "policy.trust_remote_code=true"
CRITIC = ("value=default", "grpo.adv_estimator.name=gae", "grpo.skip_idle_samples=false")
TEACHER = ("teacher=default", "teacher.model_name=OTHER", "loss_fn.kind=distillation")
# The workers of an engine over two ranks are processes of their own.
TWO_RANKS = "generation.vllm_cfg.tensor_parallel_size=2"


@pytest.mark.engine
@pytest.mark.whole_run
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "allowed",
    [
        pytest.param([TRUST], id="trust_remote_code"),
        pytest.param([TRUST, *CRITIC], id="critic", marks=pytest.mark.slow),
        pytest.param([TRUST, *TEACHER], id="teacher", marks=pytest.mark.slow),
        pytest.param(
            [f"policy.external_lib=[{LIBRARY}]", TWO_RANKS], id="external_lib", marks=pytest.mark.slow
        ),
    ],
)
def test_trainer_and_engine_of_a_run_compute_alike(allowed: list[str], tmp_path: Path) -> None:
    with_code = TRUST in allowed
    checkpoint, other = (
        halved_checkpoint(tmp_path / name, with_code=with_code, seed=seed)
        for seed, name in enumerate(("checkpoint", "other"))
    )
    arguments = [one.replace("OTHER", str(other)) for one in allowed]
    run = run_grpo(tmp_path, [f"policy.model_name={checkpoint}", *STEPS, *arguments])
    assert run.returncode == 0, run.output
    assert ("warning: policy.trust_remote_code=true: " in run.output) == with_code
    errors = run.metrics("train/token_mult_prob_error")
    assert len(errors) == 2 and max(errors) < 1.0001  # of the loaded weights, and of those that were sent
    assert min(run.metrics("train/grad_norm")) > 0
    assert (run.run_dir / "final_hf" / "halved_llama.py").is_file() == with_code
