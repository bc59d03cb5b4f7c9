"""GRPO as one would write it in a single process: Hugging Face generation with KV cache, AdamW, no framework.

The yardstick for ``end_to_end.py``: same model, prompts, batches, updates and learning rates.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from nemo_like.algorithms.advantages import group_relative_advantages
from nemo_like.configuration import Config
from nemo_like.data.datasets import build_dataset
from nemo_like.data.interface import TaskPrompt
from nemo_like.data.sampler import PromptSampler
from nemo_like.data.tokenizer import Tokenizer
from scripts.bench.plain_model import PlainModel


@dataclass(frozen=True, slots=True)
class PlainStep:
    """Seconds of one step and its mean reward."""

    step_s: float
    generation_s: float
    training_s: float
    reward: float

    def as_metrics(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Rollout:
    """tokens [N, P + L] int64, left-padded prompts; the rest [N, L] over response positions."""

    tokens: Tensor
    attention: Tensor  # [N, P + L]
    mask: Tensor
    logprobs: Tensor


class PlainLoop:
    """Two threads, one process."""

    def __init__(self, cfg: Config, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch.manual_seed(cfg.grpo.seed)
        self.cfg = cfg
        self.plain = PlainModel(cfg.policy, cfg.loss_fn)
        self.model = self.plain.model
        self.tokenizer = Tokenizer(cfg.policy.model_name)
        self.dataset = build_dataset(cfg.data.train[0], split="train")
        self.sampler = PromptSampler(len(self.dataset), cfg.grpo.seed, cfg.data.shuffle)
        self.num_updates = 0

    def step(self) -> PlainStep:
        """One rollout of P x G samples and its updates."""
        grpo = self.cfg.grpo
        started_s = time.perf_counter()
        examples = [self.dataset[i] for i in self.sampler.next(grpo.num_prompts_per_step)]
        repeated = [example for example in examples for _ in range(grpo.num_generations_per_prompt)]
        rollout = self._generate(repeated)
        rewards = self._rewards(repeated, rollout)
        generated_s = time.perf_counter()
        group_ids = [i for i in range(len(examples)) for _ in range(grpo.num_generations_per_prompt)]
        advantages = group_relative_advantages(
            rewards,
            group_ids,
            normalize_rewards=grpo.normalize_rewards,
            use_leave_one_out_baseline=grpo.use_leave_one_out_baseline,
        )
        self._train(rollout, torch.tensor(advantages))
        ended_s = time.perf_counter()
        return PlainStep(
            step_s=ended_s - started_s,
            generation_s=generated_s - started_s,
            training_s=ended_s - generated_s,
            reward=sum(rewards) / len(rewards),
        )

    @torch.no_grad()
    def _generate(self, examples: list[TaskPrompt]) -> Rollout:
        prompts = self.tokenizer.encode_prompts(
            [example.prompt for example in examples],
            [example.tools for example in examples],
            [example.template for example in examples],
        )
        width = max(map(len, prompts))
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        tokens = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        attention = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        cache, current = DynamicCache(config=self.model.config), tokens
        is_done = torch.zeros(len(prompts), dtype=torch.bool)
        logprobs, masks = [], []
        for _ in range(self.cfg.generation.max_new_tokens):
            logits = self.model(
                input_ids=current,
                attention_mask=attention,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            log_softmax = F.log_softmax(logits / self.cfg.generation.temperature, dim=-1)
            sampled = torch.multinomial(log_softmax.exp(), 1)
            masks.append(~is_done)
            logprobs.append(log_softmax.gather(1, sampled)[:, 0])
            current = torch.where(is_done[:, None], pad, sampled)
            tokens = torch.cat([tokens, current], dim=1)
            attention = torch.cat([attention, (~is_done)[:, None].long()], dim=1)
            positions = positions[:, -1:] + 1
            is_done = is_done | (sampled[:, 0] == eos)
            if is_done.all():
                break
        mask = torch.stack(masks, dim=1).float()
        return Rollout(tokens, attention, mask, torch.stack(logprobs, dim=1) * mask)

    def _rewards(self, examples: list[TaskPrompt], rollout: Rollout) -> list[float]:
        responses = rollout.tokens[:, -rollout.mask.shape[1] :].tolist()
        lengths = rollout.mask.sum(1).long().tolist()
        eos = self.tokenizer.eos_token_id
        rewards = []
        for example, response, length in zip(examples, responses, lengths, strict=True):
            answer = response[:length]
            is_right = answer[-1] == eos and self.tokenizer.decode(answer[:-1]) == example.answer
            rewards.append(float(is_right))
        return rewards

    def _train(self, rollout: Rollout, advantages: Tensor) -> None:
        positions = (rollout.attention.cumsum(1) - 1).clamp(min=0)
        width = rollout.mask.shape[1]
        for rows in torch.arange(len(advantages)).split(self.cfg.policy.train_global_batch_size):
            self._set_lr()
            logits = self.model(
                input_ids=rollout.tokens[rows],
                attention_mask=rollout.attention[rows],
                position_ids=positions[rows],
            ).logits[:, -width - 1 : -1]
            log_softmax = F.log_softmax(logits / self.cfg.generation.temperature, dim=-1)
            logprobs = log_softmax.gather(2, rollout.tokens[rows, -width:, None])[..., 0]
            losses = self.plain.clipped_loss(logprobs, rollout.logprobs[rows], advantages[rows, None])
            mask = rollout.mask[rows]
            ((losses * mask).sum() / mask.sum()).backward()
            self.plain.update()

    def _set_lr(self) -> None:
        scheduler, peak = self.cfg.policy.scheduler, self.cfg.policy.optimizer.lr
        self.num_updates += 1
        warmup = min(1.0, self.num_updates / max(1, scheduler.warmup_updates))
        decay = 1.0 - self.num_updates / scheduler.decay_updates
        for group in self.plain.optimizer.param_groups:
            group["lr"] = peak * min(warmup, max(decay, 0.0))
