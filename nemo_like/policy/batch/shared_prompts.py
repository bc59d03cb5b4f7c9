"""Causal attention in a row of tokens that holds each prompt once for all the samples that begin with it.

    [prompt 1][prompt 2]  [after][after][after]  [after][after]  [unused]
         runs: 2 prompts       3 samples of 1        2 of 2

A prompt attends to itself; the tokens after the prompt in a sample attend to the prompt and to themselves.
Every token gets the same output as in a row of its sample alone (as in Prefix Grouper, arXiv 2506.05433).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from nemo_like.policy.backends.varlen import Sequences, attend_varlen


class SharedRow:
    """The slots of a row of ``num_tokens`` tokens: first k prompts, then the rest of each of n samples.

    ``run`` [n] int64 is the number of each sample's prompt; ``prompt_lengths`` [k] and ``after_lengths`` [n]
    are int64. Raises ValueError when prompts and samples do not fit into the row.
    """

    def __init__(self, prompt_lengths: Tensor, run: Tensor, after_lengths: Tensor, num_tokens: int) -> None:
        self.prompt_lengths, self.run, self.after_lengths = prompt_lengths, run, after_lengths
        self.num_tokens = num_tokens
        self.lengths = prompt_lengths[run] + after_lengths  # [n], the prompt and what follows it
        ends = torch.cat((prompt_lengths, after_lengths)).cumsum(0)
        self.prompt_ends = ends[: len(prompt_lengths)]  # [k], the slot after each prompt's last token
        self.prompt_starts = self.prompt_ends - prompt_lengths
        self.after_starts = ends[len(prompt_lengths) :] - after_lengths  # [n] slots
        self.num_prompt_tokens, self.num_used = int(self.prompt_ends[-1]), int(ends[-1])
        if self.num_used > num_tokens:
            raise ValueError(f"prompts and responses of {self.num_used} tokens do not fit into {num_tokens}")


@dataclass(frozen=True, slots=True)
class PaddedAttention:
    """Attention on a CPU, by scaled_dot_product_attention on a batch of n whole samples, each with its
    prompt.

    Padding comes after all tokens that are read, so no mask is needed, whose memory would grow with the
    square of the samples' lengths. A prompt is computed in each of its samples, and its output is read from
    the first.
    """

    samples: Tensor  # [n, L] int64, slots; padded with slot 0
    output_index: Tensor  # [T] int64, a slot's index in the flattened n x L outputs

    @classmethod
    def of(cls, row: SharedRow) -> Self:
        is_token = torch.arange(int(row.lengths.max())) < row.lengths[:, None]
        samples = torch.zeros(is_token.shape, dtype=torch.int64)
        samples[is_token] = slots = _sample_slots(row)
        (places,) = is_token.flatten().nonzero(as_tuple=True)
        output_index = torch.full((row.num_tokens,), samples.numel()).scatter_reduce(0, slots, places, "amin")
        return cls(samples=samples, output_index=output_index.clamp(max=samples.numel() - 1))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute the attention of a row. query: [T, heads, d]; key: [T, groups, d]; value: [T, groups, e].

        Returns [T, heads, e], with arbitrary values in unused slots.
        """
        query, key, value = (_picked(tensor, self.samples) for tensor in (query, key, value))
        outputs = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        return outputs.transpose(1, 2).flatten(0, 1).index_select(0, self.output_index)


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """Attention on a GPU in half precision, by PyTorch's variable-length FlashAttention, without padding or
    mask."""

    num_prompt_tokens: int
    num_used: int
    prompts: Sequences  # each attends to itself
    after: Sequences  # what follows the prompt in a sample attends to the prompt and to itself
    seen: Tensor  # int64, the slots of all tokens that ``after`` attends to, sample by sample

    @classmethod
    def of(cls, row: SharedRow) -> Self:
        return cls(
            num_prompt_tokens=row.num_prompt_tokens,
            num_used=row.num_used,
            prompts=Sequences.of(row.prompt_lengths, row.prompt_lengths),
            after=Sequences.of(row.after_lengths, row.lengths),
            seen=_sample_slots(row),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute the attention of a row. query: [T, heads, d]; key: [T, groups, d]; value: [T, groups, e].

        Returns [T, heads, e], with 0 in unused slots.
        """
        end, used = self.num_prompt_tokens, self.num_used
        outputs = [attend_varlen(query[:end], key[:end], value[:end], self.prompts, scale)]
        if self.after.max_queries:
            keys, values = (tensor.index_select(0, self.seen) for tensor in (key, value))
            outputs.append(attend_varlen(query[end:used], keys, values, self.after, scale))
        unused = query.new_zeros(len(query) - used, query.shape[1], value.shape[-1])
        return torch.cat((*outputs, unused))


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """What a model needs to know of a row in which samples share prompts."""

    max_length: int  # positions of the longest sample
    attention: PaddedAttention | VarlenAttention

    @classmethod
    def of(cls, row: SharedRow, device: torch.device) -> Self:
        kind = PaddedAttention if device.type == "cpu" else VarlenAttention
        return cls(max_length=int(row.lengths.max()), attention=kind.of(row))


def piece_indexes(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the numbers starts[i], starts[i] + 1, ... of every piece, piece after piece, [sum of lengths]
    int64."""
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - ends + lengths, lengths)


def _sample_slots(row: SharedRow) -> Tensor:
    """Return the slots of all tokens by sample, each sample with its prompt, [sum of lengths] int64."""
    starts = torch.stack((row.prompt_starts[row.run], row.after_starts), dim=1)
    lengths = torch.stack((row.prompt_lengths[row.run], row.after_lengths), dim=1)
    return piece_indexes(starts.flatten(), lengths.flatten())


def _picked(tensor: Tensor, slots: Tensor) -> Tensor:
    """Select slots [n, L] of a row's tensor [T, heads, d]; return [n, heads, L, d]."""
    return tensor.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)
