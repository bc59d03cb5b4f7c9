"""TRL's process in ``against_others.py``: ``GRPOTrainer`` with this project's configuration of the same run.

It needs TRL, accelerate and datasets on the path, which no run of this framework needs.
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from nemo_like.configuration import Config, load_config
from nemo_like.data.arithmetic import ArithmeticDataset
from nemo_like.policy.options import Device
from scripts.bench.others.task import held_out_accuracy, updates_per_step
from scripts.bench.others.turns import SideTurns, side_arguments


def main() -> None:
    options = side_arguments(__doc__)
    cfg = load_config(options.config, options.overrides)
    with tempfile.TemporaryDirectory() as directory:
        reward = ExactMatch(cfg)
        trainer = GRPOTrainer(
            model=cfg.policy.model_name,
            reward_funcs=reward,
            args=grpo_config(cfg, options.generator, directory),
            train_dataset=_problems(cfg),
            processing_class=AutoTokenizer.from_pretrained(cfg.policy.model_name),
        )
        if options.generator == "vllm" and cfg.policy.device is Device.cpu:
            sync_layer_by_layer(trainer.vllm_generation)
        trainer.add_callback(TurnsOfTrainer(cfg, reward, trainer, options.pipe))
        trainer.train()


def sync_layer_by_layer(generation: VLLMGeneration) -> None:
    """Have TRL give vLLM new weights by vLLM's reload. On CPUs vLLM has packed its weights, and TRL, which
    writes over them one by one, ends with an AttributeError at its first sync."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    engine = generation.llm.llm_engine
    model = engine.model_executor.driver_worker.model_runner.model

    @torch.no_grad()
    def sync_weights() -> None:
        initialize_layerwise_reload(model)
        model.load_weights(generation._iter_named_params())
        finalize_layerwise_reload(model, engine.model_config)
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)  # tied: packed by itself
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights  # type: ignore[method-assign]


def grpo_config(cfg: Config, generator: str, directory: str) -> GRPOConfig:
    """Return the arguments of the same run for TRL."""
    grpo, policy, on_cpu = cfg.grpo, cfg.policy, cfg.policy.device is Device.cpu
    return GRPOConfig(
        output_dir=directory,
        seed=grpo.seed,
        use_cpu=on_cpu,
        bf16=not on_cpu,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=policy.train_global_batch_size,
        gradient_accumulation_steps=1,
        steps_per_generation=updates_per_step(cfg),
        num_generations=grpo.num_generations_per_prompt,
        max_completion_length=cfg.generation.max_new_tokens,
        temperature=cfg.generation.temperature,
        beta=0.0,
        epsilon=cfg.loss_fn.ratio_clip_min,  # type: ignore[attr-defined]  # the demo's loss clips
        epsilon_high=cfg.loss_fn.ratio_clip_max,  # type: ignore[attr-defined]
        max_steps=policy.scheduler.decay_updates,
        lr_scheduler_type="linear",
        warmup_steps=policy.scheduler.warmup_updates,
        learning_rate=policy.optimizer.lr,
        adam_beta1=policy.optimizer.adam_beta1,
        adam_beta2=policy.optimizer.adam_beta2,
        adam_epsilon=policy.optimizer.adam_eps,
        weight_decay=policy.optimizer.weight_decay,
        max_grad_norm=policy.max_grad_norm,
        use_vllm=generator == "vllm",
        vllm_mode="colocate",
        vllm_max_model_length=policy.max_total_sequence_length,
        vllm_importance_sampling_correction=False,
        vllm_gpu_memory_utilization=cfg.generation.vllm_cfg.gpu_memory_utilization,
        save_strategy="no",
        report_to="none",
        logging_steps=updates_per_step(cfg),
        disable_tqdm=True,
    )


class ExactMatch:
    """The demo's reward: 1 for exactly the answer, with its end. Counts the tokens that it judges."""

    __name__ = "exact_match"

    def __init__(self, cfg: Config) -> None:
        self._eos = AutoTokenizer.from_pretrained(cfg.policy.model_name).eos_token_id
        self.new_tokens = 0

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        self.new_tokens += sum(map(len, completion_ids))
        return [
            float(ids[-1] == self._eos and text == right)
            for text, ids, right in zip(completions, completion_ids, answer, strict=True)
        ]


class TurnsOfTrainer(TrainerCallback):
    """Holds the trainer at the end of a step while it isn't its turn."""

    def __init__(self, cfg: Config, reward: ExactMatch, trainer: GRPOTrainer, pipe: int) -> None:
        self._cfg, self._reward, self._trainer, self._pipe = cfg, reward, trainer, pipe
        self._turns: SideTurns | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._turns = SideTurns(self._pipe, self._accuracy)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the last update of a step of GRPO, end the step."""
        if state.global_step % updates_per_step(self._cfg):
            return
        assert self._turns is not None  # training has begun
        new_tokens, self._reward.new_tokens = self._reward.new_tokens, 0
        self._turns.step_ended(new_tokens)
        control.should_training_stop = not self._turns.is_open

    def _accuracy(self) -> float:
        model = copy.deepcopy(self._trainer.accelerator.unwrap_model(self._trainer.model)).cpu()
        return held_out_accuracy(model, self._cfg)


def _problems(cfg: Config) -> Dataset:
    problems = ArithmeticDataset(cfg.data.train[0].digits, "train")
    examples = [problems[index] for index in range(len(problems))]
    return Dataset.from_list([{"prompt": one.prompt, "answer": one.answer} for one in examples])
