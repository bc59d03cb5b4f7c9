"""Causal attention in a row of tokens that holds each prompt once for all the samples that begin with it.

    [prompt 1][prompt 2]  [after][after][after]  [after][after]  [unused]
         runs: 2 prompts       3 samples of 1        2 of 2

A prompt attends to itself; what comes after the prompt in a sample attends to the prompt and to itself. Every
token's output is what it would be in a row of its sample alone (as in Prefix Grouper, arXiv 2506.05433).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from nemo_like.policy.varlen import Sequences, attend_varlen


class SharedRow:
    """The slots of a row of ``num_tokens`` tokens: first k prompts, then what follows them in n samples.

    ``run`` [n] int64 is the number of each sample's prompt; ``prompt_lengths`` [k] and ``after_lengths`` [n]
    are int64. Raises ValueError when prompts and samples do not fit into the row.
    """

    def __init__(self, prompt_lengths: Tensor, run: Tensor, after_lengths: Tensor, num_tokens: int) -> None:
        self.prompt_lengths, self.run, self.after_lengths = prompt_lengths, run, after_lengths
        self.num_tokens = num_tokens
        self.lengths = prompt_lengths[run] + after_lengths  # [n], the prompt and what follows it
        ends = torch.cat((prompt_lengths, after_lengths)).cumsum(0)
        self.prompt_ends = ends[: len(prompt_lengths)]  # [k] slots, one past a prompt's last
        self.prompt_starts = self.prompt_ends - prompt_lengths
        self.after_starts = ends[len(prompt_lengths) :] - after_lengths  # [n] slots
        self.num_prompt_tokens, self.num_used = int(self.prompt_ends[-1]), int(ends[-1])
        if self.num_used > num_tokens:
            raise ValueError(f"prompts and responses of {self.num_used} tokens do not fit into {num_tokens}")


@dataclass(frozen=True, slots=True)
class PaddedAttention:
    """Attention by scaled_dot_product_attention, for a CPU: a batch of k prompts, then a batch of n samples.

    Both batches are padded with slot 0. The mask hides this padding, or it comes after all that is read.
    """

    prompts: Tensor  # [k, P] int64, slots
    after: Tensor  # [n, A] int64, slots
    seen: Tensor  # [n, P + A] int64, the slots that a sample's later tokens attend to
    is_seen: Tensor  # [n, 1, A, P + A] bool
    place: Tensor  # [T] int64, a slot's place in the outputs of both batches, flattened: k x P and n x A

    @classmethod
    def of(cls, row: SharedRow) -> Self:
        prompts, is_prompt = _slots(row.prompt_starts, row.prompt_lengths)
        after, is_after = _slots(row.after_starts, row.after_lengths)
        num_after = after.shape[1]
        causal = torch.ones(num_after, num_after, dtype=torch.bool).tril()
        in_prompt = is_prompt[row.run, None].expand(-1, num_after, -1)
        places = torch.cat((is_prompt.flatten(), is_after.flatten())).nonzero()[:, 0]
        return cls(
            prompts=prompts,
            after=after,
            seen=torch.cat((prompts[row.run], after), dim=1),
            is_seen=torch.cat((in_prompt, causal.expand(len(after), -1, -1)), dim=2)[:, None],
            place=functional.pad(places, (0, row.num_tokens - len(places))),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute the attention of a row. query: [T, heads, d]; key, value: [T, groups, d].

        Returns [T, heads, d], with arbitrary values in unused slots.
        """
        of_prompts = functional.scaled_dot_product_attention(
            _picked(query, self.prompts),
            _picked(key, self.prompts),
            _picked(value, self.prompts),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
        outputs = [of_prompts.transpose(1, 2).flatten(0, 1)]
        if self.after.numel():
            of_samples = functional.scaled_dot_product_attention(
                _picked(query, self.after),
                _picked(key, self.seen),
                _picked(value, self.seen),
                self.is_seen,
                scale=scale,
                enable_gqa=True,
            )
            outputs.append(of_samples.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.place)


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """Attention by PyTorch's variable-length FlashAttention, for a GPU in half precision, without padding or
    mask."""

    num_prompt_tokens: int
    num_used: int
    prompts: Sequences  # each attends to itself
    after: Sequences  # what follows the prompt in a sample attends to the prompt and to itself
    seen: Tensor  # int64, the slots of all tokens that ``after`` attends to, sample by sample

    @classmethod
    def of(cls, row: SharedRow) -> Self:
        prompts, is_prompt = _slots(row.prompt_starts, row.prompt_lengths)
        after, is_after = _slots(row.after_starts, row.after_lengths)
        slots = torch.cat((prompts[row.run], after), dim=1)
        return cls(
            num_prompt_tokens=row.num_prompt_tokens,
            num_used=row.num_used,
            prompts=Sequences.of(row.prompt_lengths, row.prompt_lengths),
            after=Sequences.of(row.after_lengths, row.lengths),
            seen=slots[torch.cat((is_prompt[row.run], is_after), dim=1)],
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute the attention of a row. query: [T, heads, d]; key, value: [T, groups, d].

        Returns [T, heads, d], with 0 in unused slots.
        """
        end, used = self.num_prompt_tokens, self.num_used
        outputs = [attend_varlen(query[:end], key[:end], value[:end], self.prompts, scale)]
        if self.after.max_queries:
            keys, values = (tensor.index_select(0, self.seen) for tensor in (key, value))
            outputs.append(attend_varlen(query[end:used], keys, values, self.after, scale))
        return torch.cat((*outputs, query.new_zeros(query[used:].shape)))


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """What a model needs to compute on a row in which samples share prompts."""

    max_length: int  # positions of the longest sample
    attention: PaddedAttention | VarlenAttention

    @classmethod
    def of(cls, row: SharedRow, device: torch.device) -> Self:
        kind = PaddedAttention if device.type == "cpu" else VarlenAttention
        return cls(max_length=int(row.lengths.max()), attention=kind.of(row))


def pieces(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the numbers starts[i], starts[i] + 1, ... of every piece, one piece after the other,
    [sum of lengths] int64."""
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - ends + lengths, lengths)


def _slots(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots of n pieces, [n, longest] int64 padded with 0, and where they are no padding, bool."""
    positions = torch.arange(int(lengths.max()))
    is_token = positions < lengths[:, None]
    return (starts[:, None] + positions).masked_fill_(~is_token, 0), is_token


def _picked(tensor: Tensor, slots: Tensor) -> Tensor:
    """Select slots [n, L] of a row's tensor [T, heads, d]; return [n, heads, L, d]."""
    return tensor.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)
