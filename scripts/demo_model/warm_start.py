"""A short supervised warm start: a tiny Qwen3, or mixture of experts, that solves part of an addition task.

GRPO learns from differences between the answers of one group, so it needs a model that is sometimes
right. ``warm_start`` makes one in seconds and leaves most of the task to be learnt.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_like.data.arithmetic import ArithmeticDataset
from nemo_like.data.interface import TaskPrompt

from .tiny_tokenizer import EOS, PAD, VOCABULARY_SIZE, vocabulary

_LEARNING_RATE = 3e-3
_WARMUP_STEPS = 20
_BATCH_SIZE = 64
_MAX_GRAD_NORM = 1.0
_MAX_STEPS = 3000
_NUM_HELD_OUT = 512
_IGNORED_LABEL = -100

# Accuracy rises late and fast. It is measured every _LOOK_STEPS steps before it rises, and every
# _CLOSE_LOOK_STEPS while it does, so that training does not run past the target.
_LOOK_STEPS = 25
_CLOSE_LOOK_STEPS = 5
_CLOSE_ACCURACIES = (0.08, 0.5)


@dataclass(frozen=True, slots=True)
class WarmStartProgress:
    """How far the warm start is; ``accuracy`` is the latest that was measured."""

    step: int
    loss: float  # nats per answer token
    accuracy: float


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The finished model and what it took. ``accuracy`` is the share of held-out problems that it answers
    right when sampled at temperature 1."""

    model: PreTrainedModel
    steps: int
    accuracy: float
    seconds: float


def tiny_config(hidden_size: int = 128) -> Qwen3Config:
    """Return the configuration of a model with tied embeddings, of 402k float32 parameters; with a
    ``hidden_size`` of 192 it has 898k. It is a multiple of 64: heads have 32, and two share their keys."""
    return Qwen3Config(**tiny_sizes(hidden_size))


def tiny_mixture_config(num_experts: int) -> Qwen3MoeConfig:
    """Return the configuration of a mixture that is ``tiny_config`` with experts in place of each FFN; a
    token is computed by two of them. With 8 experts it has 896k float32 parameters, of which a token uses
    half."""
    return Qwen3MoeConfig(
        **tiny_sizes(hidden_size=128),
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
    )


def tiny_sizes(hidden_size: int) -> dict[str, Any]:
    """Return what tiny models of most families have in common: their sizes, their tokens and their dtype."""
    tokens = vocabulary()
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 64,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": tokens[EOS],
        "pad_token_id": tokens[PAD],
        "dtype": torch.float32,
    }


def warm_start(
    config: PreTrainedConfig,
    digits: int,
    seed: int,
    target_accuracy: float,
    on_progress: Callable[[WarmStartProgress], None] = lambda progress: None,
    learning_rate: float = _LEARNING_RATE,
) -> WarmStart:
    """Train a model of this configuration on the training split until its sampled held-out accuracy reaches
    ``target_accuracy``. Above an accuracy of 0.5 the learning rate falls with the share of wrong answers.

    The same arguments give the same model on the same machine. Raises RuntimeError when 3000 steps do not
    reach the target.
    """
    started_s = time.perf_counter()
    torch.manual_seed(seed)
    order = random.Random(seed)
    train = ArithmeticDataset(digits, "train")
    held_out = ArithmeticDataset(digits, "validation")
    looked_at = [held_out[i] for i in range(min(_NUM_HELD_OUT, len(held_out)))]
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    accuracy = 0.0
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS, 2 * (1 - accuracy))
    )
    for step in range(1, _MAX_STEPS + 1):
        examples = [train[order.randrange(len(train))] for _ in range(_BATCH_SIZE)]
        loss = _train_step(model, optimizer, examples)
        schedule.step()
        is_rising = _CLOSE_ACCURACIES[0] <= accuracy < _CLOSE_ACCURACIES[1]
        if step % (_CLOSE_LOOK_STEPS if is_rising else _LOOK_STEPS) == 0:
            accuracy = sampled_accuracy(model, looked_at, seed)
        on_progress(WarmStartProgress(step, loss, accuracy))
        if accuracy >= target_accuracy:
            return WarmStart(model, step, accuracy, time.perf_counter() - started_s)
    raise RuntimeError(
        f"the warm start reached a held-out accuracy of {accuracy:.2f} in {_MAX_STEPS} steps, not "
        f"{target_accuracy}; try another seed or fewer digits than {digits}"
    )


@torch.no_grad()
def sampled_accuracy(model: PreTrainedModel, examples: list[TaskPrompt], seed: int) -> float:
    """Return the share of problems that the model answers exactly right, one sample each at temperature 1.

    All prompts must have the same number of tokens, and so must all answers.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([_encode(str(example.prompt)) for example in examples])
    answers = torch.tensor([[*_encode(example.answer), vocabulary()[EOS]] for example in examples])
    cache = DynamicCache(config=model.config)
    sampled = []
    model.eval()
    for _ in range(answers.shape[1]):
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[
            :, -1
        ]
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        sampled.append(tokens)
    model.train()
    return (torch.cat(sampled, dim=1) == answers).all(1).float().mean().item()


def _train_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, examples: list[TaskPrompt]
) -> float:
    """Make one update on prompt, answer and eos, of which only answer and eos are learnt; return the loss."""
    eos = vocabulary()[EOS]
    rows = [[*_encode(f"{example.prompt}{example.answer}"), eos] for example in examples]
    input_ids = torch.tensor(rows)
    labels = input_ids.clone()
    labels[:, : len(examples[0].prompt)] = _IGNORED_LABEL
    logits = model(input_ids=input_ids).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED_LABEL)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
    optimizer.step()
    return loss.item()


def _encode(text: str) -> list[int]:
    """Return the tiny tokenizer's ids of a text, one per character."""
    tokens = vocabulary()
    return [tokens[character] for character in text]
