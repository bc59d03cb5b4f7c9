"""A short supervised warm start of a tiny model that calls tools, for GRPO to learn from."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from .sums import Sum, sums
from .tiny_tokenizer import EOS, PAD
from .tool_tokenizer import VOCABULARY_SIZE, tool_tokenizer, vocabulary
from .warm_start import WarmStart, WarmStartProgress, tiny_config

_LEARNING_RATE = 3e-3
_WARMUP_STEPS = 20
_BATCH_SIZE = 64
_MAX_GRAD_NORM = 1.0
_MAX_STEPS = 3000
_LOOK_STEPS = 5
_NUM_HELD_OUT = 256
_IGNORED_LABEL = -100


def tool_config(max_positions: int = 16384) -> Qwen3Config:
    """Return the configuration of the model: that of the arithmetic task with a larger vocabulary, and
    positions enough for the prompts of real harnesses."""
    tokens = vocabulary()
    return Qwen3Config(
        **{
            **tiny_config().to_dict(),
            "vocab_size": VOCABULARY_SIZE,
            "max_position_embeddings": max_positions,
            "eos_token_id": tokens[EOS],
            "pad_token_id": tokens[PAD],
            "dtype": torch.float32,
        }
    )


def warm_start(
    seed: int, target_accuracy: float, on_progress: Callable[[WarmStartProgress], None]
) -> WarmStart:
    """Train a model on solutions until it makes the calls of a held-out one with this probability.

    Raises RuntimeError when 3000 steps do not reach the target.
    """
    started_s = time.perf_counter()
    torch.manual_seed(seed)
    tokenizer = tool_tokenizer()
    model = AutoModelForCausalLM.from_config(tool_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS))
    held_out = _batch(tokenizer, islice(sums(random.Random(seed), held_out=True), _NUM_HELD_OUT))
    accuracy = 0.0
    for step, (input_ids, labels) in enumerate(islice(batches(seed), _MAX_STEPS), start=1):
        logits = model(input_ids=input_ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED_LABEL)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        if step % _LOOK_STEPS == 0:
            accuracy = _accuracy(model, *held_out)
        on_progress(WarmStartProgress(step, loss.item(), accuracy))
        if accuracy >= target_accuracy:
            return WarmStart(model, step, accuracy, time.perf_counter() - started_s)
    raise RuntimeError(f"the warm start reached {accuracy:.2f} in {_MAX_STEPS} steps; try another seed")


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of solutions without end: token ids, [problems, T] int64, and the same as labels, where
    -100 stands for all that the model does not say."""
    tokenizer, problems = tool_tokenizer(), sums(random.Random(seed), held_out=False)
    while True:
        yield _batch(tokenizer, islice(problems, _BATCH_SIZE))


@torch.no_grad()
def _accuracy(model: PreTrainedModel, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean probability of sampling all calls of a solution."""
    logprobs = model(input_ids=input_ids).logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    taken = logprobs.gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]
    return torch.where(targets == _IGNORED_LABEL, 0.0, taken).sum(1).exp().mean().item()


def _batch(tokenizer: PreTrainedTokenizerFast, problems: Iterator[Sum]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of solutions, [problems, T], and the same with all that the model does not say
    ignored."""
    rows = [_labelled(tokenizer, problem) for problem in problems]
    length = max(len(ids) for ids, _ in rows)
    pad = vocabulary()[PAD]
    return (
        torch.tensor([_padded(ids, length, pad) for ids, _ in rows]),
        torch.tensor([_padded(labels, length, _IGNORED_LABEL) for _, labels in rows]),
    )


def _padded(values: Sequence[int], length: int, value: int) -> list[int]:
    return [*values, *([value] * (length - len(values)))]


def _labelled(tokenizer: PreTrainedTokenizerFast, problem: Sum) -> tuple[list[int], list[int]]:
    messages = problem.solution()
    ids: list[int] = []
    labels: list[int] = []
    for end in range(1, len(messages), 2):
        before = tokenizer.apply_chat_template(messages[:end], add_generation_prompt=True, tokenize=False)
        text = tokenizer.apply_chat_template(messages[: end + 1], tokenize=False).removesuffix("\n")
        given, said = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, text))
        labels = [*labels, *([_IGNORED_LABEL] * (len(given) - len(ids))), *said[len(given) :]]
        ids = said
    return ids, labels
