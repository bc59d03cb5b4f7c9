"""A worker's share of a batch as packed tensors, and the padded micro-batches cut from it.

The data plane hands over columns packed: one contiguous array per column, samples one after the
other. They stay that way. Only the token ids that enter the model are padded, one micro-batch at a
time; everything per token that a loss or a metric needs is picked from the packed columns for the
scored tokens alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_like.data_plane.columns import INPUT_IDS, RESPONSE_MASK
from nemo_like.data_plane.meta import MicroBatch

_PLANNING_COLUMNS = frozenset({INPUT_IDS.name, RESPONSE_MASK.name})
PAD_TOKEN_ID = 0  # any valid id: padding comes after every real token, which causal attention never sees


@dataclass(frozen=True, slots=True)
class PaddedMicroBatch:
    """What one forward needs: n samples padded to T positions, and which M tokens to score.

    A token at position t is scored by the model's output at t - 1.
    """

    input_ids: Tensor  # [n, T] int64, right-padded
    position_ids: Tensor  # [n, T] int64
    token_ids: Tensor  # [M] int64, the scored tokens, by sample, then by position
    output_index: Tensor  # [M] int64, where the model predicts them: (t - 1) * n + sample, i.e. into [T, n]
    sample_index: Tensor  # [M] int64, their sample within the micro-batch
    packed_index: Tensor  # [M] int64, their place in the packed columns
    rows: Tensor  # [n] int64, the samples' positions in the worker's batch

    def to(self, device: torch.device) -> PaddedMicroBatch:
        """A copy on the device; itself where it is there already."""
        if device.type == "cpu":
            return self
        return PaddedMicroBatch(
            **{name: getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__}
        )


class PolicyBatch:
    """N samples of one data-parallel rank: packed columns, lengths, and per-sample values.

    ``columns`` are 1-D of sum(lengths) values in the samples' order; ``sample_values`` hold one
    float per sample. ``response_lengths`` [N] float32 counts each sample's scored tokens. All of
    these are on ``device``, except the token ids and the response mask: micro-batches are planned on
    the host.

    Raises ValueError when a column's size does not match the lengths, or when a sample's first token
    is marked as generated: nothing predicts it.
    """

    def __init__(
        self,
        columns: Mapping[str, np.ndarray | Tensor],
        lengths: Sequence[int],
        sample_values: Mapping[str, Sequence[float]],
        device: torch.device,
    ) -> None:
        self.device = device
        self.lengths = torch.as_tensor(np.asarray(lengths, dtype=np.int64))
        self.num_tokens = int(self.lengths.sum())
        ends = self.lengths.cumsum(0)
        self.offsets = ends - self.lengths
        for name, values in columns.items():
            if len(values) != self.num_tokens:
                raise ValueError(
                    f"column {name!r} has {len(values)} tokens for lengths that sum to {self.num_tokens}"
                )
        with warnings.catch_warnings():
            # The data plane's arrays are read-only views; nothing here writes into a column.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self.columns = {
                name: torch.as_tensor(values, device="cpu" if name in _PLANNING_COLUMNS else device)
                for name, values in columns.items()
            }
        self.sample_values = {
            name: torch.tensor(values, dtype=torch.float32, device=device)
            for name, values in sample_values.items()
        }
        mask = self.columns[RESPONSE_MASK.name]
        if self.num_tokens and bool(mask[self.offsets].any()):
            raise ValueError(
                f"{RESPONSE_MASK.name} marks the first token of a sample, which nothing predicts"
            )
        self.response_lengths = self.sum_per_sample(mask.float()).to(device)

    def __len__(self) -> int:
        return len(self.lengths)

    def sum_per_sample(self, values: Tensor) -> Tensor:
        """[N] sums of a packed [sum of lengths] tensor on the host."""
        owner = torch.repeat_interleave(torch.arange(len(self)), self.lengths)
        return torch.zeros(len(self), dtype=values.dtype).index_add_(0, owner, values)

    def micro_batch(self, spec: MicroBatch) -> PaddedMicroBatch:
        """The samples ``spec.rows``, padded to ``spec.padded_length``."""
        rows = torch.tensor(spec.rows, dtype=torch.int64)
        positions = torch.arange(spec.padded_length)
        is_token = positions < self.lengths[rows, None]
        places = (self.offsets[rows, None] + positions).masked_fill_(~is_token, 0)
        input_ids = self.columns[INPUT_IDS.name][places].to(torch.int64).masked_fill_(~is_token, PAD_TOKEN_ID)
        is_scored = self.columns[RESPONSE_MASK.name][places].to(torch.bool) & is_token
        sample_index, position = is_scored.nonzero(as_tuple=True)
        packed_index = places[sample_index, position]
        return PaddedMicroBatch(
            input_ids=input_ids,
            position_ids=positions.expand(len(rows), -1),
            token_ids=input_ids[sample_index, position],
            output_index=(position - 1) * len(rows) + sample_index,
            sample_index=sample_index,
            packed_index=packed_index,
            rows=rows,
        ).to(self.device)
