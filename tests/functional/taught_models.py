"""Tiny models that were shown how conversations of a task go: somewhat able, with much left to learn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, Qwen3ForCausalLM

from scripts.demo_model.tiny_tokenizer import EOS, PAD, UNKNOWN, save_tokenizer, vocabulary
from scripts.demo_model.warm_start import tiny_config

# (text, whether the policy says it); what the policy says may end with EOS.
Said = tuple[str, bool]
Show = Callable[[random.Random], Sequence[Said]]

_BATCH_SIZE = 64
_WARMUP_STEPS = 20
_IGNORED_LABEL = -100


def teach(directory: Path, show: Show, num_steps: int) -> Path:
    """Save a model that learnt the policy's part of ``num_steps`` batches of conversations by ``show``."""
    torch.manual_seed(0)
    rng = random.Random(0)
    model = Qwen3ForCausalLM(tiny_config())
    learn(model, (_batch([_tokens(show(rng)) for _ in range(_BATCH_SIZE)]) for _ in range(num_steps)))
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def learn(model: PreTrainedModel, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Train on batches of token ids and labels, [samples, T] each; labels of -100 are ignored."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS))
    for input_ids, labels in batches:
        logits = model(input_ids=input_ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED_LABEL)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def token_ids(text: str) -> list[int]:
    """One per character; ``EOS`` at the end is one token."""
    tokens = vocabulary()
    spelt = [tokens.get(character, tokens[UNKNOWN]) for character in text.removesuffix(EOS)]
    return [*spelt, tokens[EOS]] if text.endswith(EOS) else spelt


def _tokens(parts: Sequence[Said]) -> tuple[list[int], list[int]]:
    """Token ids, and labels that are ignored where the policy does not speak."""
    ids: list[int] = []
    labels: list[int] = []
    for text, is_policy in parts:
        part = token_ids(text)
        ids += part
        labels += part if is_policy else [_IGNORED_LABEL] * len(part)
    return ids, labels


def _batch(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    length, pad = max(len(ids) for ids, _ in rows), vocabulary()[PAD]
    input_ids = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows])
    labels = torch.tensor([row + [_IGNORED_LABEL] * (length - len(row)) for _, row in rows])
    return input_ids, labels
