"""A worker's share of a batch as packed tensors, and the model inputs of its micro-batches.

The data plane returns packed columns: one contiguous array per column, samples one after the other. The
columns stay packed. Only the token ids that enter the model are padded, or packed anew, one micro-batch at a
time. Values that a loss or a metric needs are picked from the packed columns at the scored tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nemo_like.algorithms.logprobs import LogprobSettings
from nemo_like.batch.columns import (
    ENTROPIES,
    INPUT_IDS,
    PARENT_GAPS,
    RESPONSE_MASK,
    TEACHER_TOPK_IDS,
    Column,
    Layout,
)
from nemo_like.batch.forest import Forest, ForestRow
from nemo_like.batch.meta import MicroBatch, MicroBatchLayout, Schedule
from nemo_like.batch.micro_batches import model_length
from nemo_like.batch.recordings import ROUTED_EXPERTS
from nemo_like.policy.backends.devices import on_device
from nemo_like.policy.backends.varlen import Sequences
from nemo_like.policy.batch.context_parts import WHOLE_CONTEXT, ContextRank, context_positions
from nemo_like.policy.batch.image_inputs import BatchImages, ImageInputs, RopeIndex
from nemo_like.policy.batch.token_runs import TokenRuns, piece_indexes

# Columns on the host, where micro-batches are laid out.
_PLANNING_COLUMNS = frozenset(
    {INPUT_IDS.name, RESPONSE_MASK.name, PARENT_GAPS.name, ROUTED_EXPERTS, TEACHER_TOPK_IDS}
)
PAD_TOKEN_ID = 0  # any valid id: padding follows a sample's tokens, and causal attention only looks back


@dataclass(frozen=True, slots=True)
class Packing:
    """Where packed samples lie in a row of T tokens.

    Sample i has the tokens from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``. Unused tokens at the end of the
    row count as one more sample.
    """

    cu_seqlens: Tensor  # [k + 1] int32, from 0 to T
    lengths: tuple[int, ...]  # k differences of cu_seqlens, on the host

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def sequences(self) -> Sequences:
        """The sequences of ``attend_varlen``: each sample attends to itself."""
        return Sequences(self.cu_seqlens, self.cu_seqlens, self.max_length, self.max_length)


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The input of one forward pass on a micro-batch: B rows of T tokens, and which M tokens to score.

    In layout padded each sample is a row. In layout packed all samples are in one row (B = 1): ``packing``
    says where they lie, or ``forest`` which tokens follow which, where samples or parts of one have tokens in
    common. The model's output at a token scores the tokens that follow it, so a sample's last token is not
    among the inputs. A schedule with ends includes it, and scores the end of every token run too, behind all
    tokens of the batch: the end of run r counts as token ``num_tokens`` + r.
    """

    input_ids: Tensor  # [B, T] int64, right-padded
    position_ids: Tensor  # [B, T] int64, from 0 on each path; [3, B, T] in a batch placed among images
    token_ids: Tensor  # [M] int64, the scored tokens, by sample, then by position
    output_index: Tensor  # [M] int64, where the model predicts each token: t * B + row, an index into [T, B]
    sample_index: Tensor  # [M] int64, each token's sample within the micro-batch
    packed_index: Tensor  # [M] int64, each token's position in the batch's packed columns
    rows: Tensor  # [n] int64, the samples' positions in the worker's batch
    packing: Packing | None = None
    forest: Forest | None = None
    images: ImageInputs | None = None
    routes: Tensor | None = None  # [B, T, layers, k], experts to replay from 1; 0 where the router chooses
    topk_ids: Tensor | None = None  # [M, k] int64, a teacher's most likely tokens, which training scores too
    # Under context parallelism T counts this rank's tokens, and token_ids, topk_ids and output_index have
    # only the tokens that this rank scores. context_index has the positions of these tokens among all M.
    context_index: Tensor | None = None

    def part(self, context: ContextRank) -> ModelInputs:
        """Return one context-parallel rank's part: two pieces of every sample, as Megatron-core cuts them.

        A row that is a forest is cut as one sample. ``sample_index`` and ``packed_index`` still have all M
        tokens.
        """
        if context.size == 1:
            return self
        num_rows, num_tokens = self.input_ids.shape
        lengths = (num_tokens,) if self.packing is None else self.packing.lengths
        starts = np.cumsum((0, *lengths[:-1])).tolist()
        pieces = [
            start + context_positions(length, context.rank, context.size)
            for start, length in zip(starts, lengths, strict=True)
        ]
        mine = torch.cat(pieces)
        slot_of = torch.full((num_tokens,), -1).index_copy_(0, mine, torch.arange(len(mine)))
        output_slot = slot_of[self.output_index // num_rows]
        (context_index,) = (output_slot >= 0).nonzero(as_tuple=True)
        row = self.output_index[context_index] % num_rows
        return replace(
            self,
            input_ids=self.input_ids[:, mine],
            position_ids=self.position_ids[:, mine],
            routes=None if self.routes is None else self.routes[:, mine],
            token_ids=self.token_ids[context_index],
            topk_ids=None if self.topk_ids is None else self.topk_ids[context_index],
            output_index=output_slot[context_index] * num_rows + row,
            context_index=context_index,
        )

    def without_outputs(self) -> ModelInputs:
        """Return the same input of the model, of whose tokens none is scored."""
        names = ("token_ids", "output_index", "sample_index", "packed_index", "topk_ids", "context_index")
        scored = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value[:0] for name, value in scored.items()})

    def to(self, device: torch.device) -> ModelInputs:
        """Return a copy on ``device``; the CPU, where inputs are made, gets this object itself."""
        return self if device.type == "cpu" else on_device(self, device)


class PolicyBatch:
    """The N samples of one data-parallel rank: packed columns, lengths, and per-sample values.

    ``columns`` are per token, [sum(lengths), *inner_shape] in the samples' order; ``sample_values`` hold one
    float per sample and name. ``response_lengths`` [N] float32 counts each sample's scored tokens. All of
    these are on ``device``, except token ids, response mask, parent gaps and routed experts, which stay on
    the host because micro-batches are laid out there. ``add`` takes further columns of any layout.

    Raises ValueError when a column's size does not match the lengths, or when a sample's first token is
    marked as generated: the model predicts no first token.
    """

    def __init__(
        self,
        columns: Mapping[str, np.ndarray | Tensor],
        lengths: Sequence[int],
        sample_values: Mapping[str, Sequence[float]],
        device: torch.device,
        prompt_index: Sequence[int] = (),
    ) -> None:
        """Move the columns to their devices. ``prompt_index`` [N] gives each sample's index in the values of
        per_prompt columns; only such columns need it."""
        self.device = device
        self._prompt_index = torch.tensor(prompt_index, dtype=torch.int64)
        self._values: dict[str, Tensor | Sequence[Any]] = {}  # columns with values per sample or per prompt
        self._rope_positions: Tensor | None = None  # [sum of lengths, 3] int64, on the host
        self._entropy_threshold = 0.0
        self.lengths = torch.as_tensor(np.asarray(lengths, dtype=np.int64))
        self._model_lengths = torch.tensor(
            [model_length(length) for length in self.lengths.tolist()], dtype=torch.int64
        )
        self.num_tokens = int(self.lengths.sum())
        ends = self.lengths.cumsum(0)
        self.offsets = ends - self.lengths
        self.columns: dict[str, Tensor] = {}
        for name, values in columns.items():
            self._add_per_token(name, values)
        self.set_sample_values(sample_values)
        mask = self.columns[RESPONSE_MASK.name]
        if self.num_tokens and bool(mask[self.offsets].any()):
            raise ValueError(
                f"{RESPONSE_MASK.name} marks the first token of a sample, which nothing predicts"
            )
        self.response_lengths = self.sum_per_sample(mask.float()).to(device)

    def __len__(self) -> int:
        return len(self.lengths)

    def __contains__(self, column: Column) -> bool:
        return column.name in self.columns or column.name in self._values

    def add(self, columns: Mapping[Column, Any]) -> None:
        """Add columns as the data plane returns them (``data_plane.interface.ColumnData``), or as tensors.

        Raises ValueError for a per_token column whose size does not match the lengths.
        """
        for column, values in columns.items():
            if column.layout is Layout.per_token:
                self._add_per_token(column.name, values)
            else:
                self._values[column.name] = _tensor(values, self.device) if column.is_dense else values

    def set_sample_values(self, values: Mapping[str, Sequence[float]]) -> None:
        """Replace all sample values by ``values``: under each name, one float per sample."""
        self.sample_values = {
            name: torch.tensor(of_samples, dtype=torch.float32, device=self.device)
            for name, of_samples in values.items()
        }

    def set_entropy_threshold(self, threshold: float) -> None:
        """Say from which entropy on, in nats, tokens have a policy gradient; needs the column entropies."""
        self._entropy_threshold = threshold

    def entropy_gate(self, inputs: ModelInputs) -> Tensor:
        """Return 1 for a micro-batch's scored tokens of at least the threshold's entropy, 0 for others, [M]
        float32."""
        entropies = self.columns[ENTROPIES.name][inputs.packed_index]
        return (entropies >= self._entropy_threshold).to(torch.float32)

    def values_of(self, column: Column, inputs: ModelInputs) -> Tensor | list[Any]:
        """Return a column's values for a micro-batch of n samples.

        A per_token column gives its values at the scored tokens, [M, *inner_shape]; any other column gives a
        value per sample, [n, *inner_shape] or a list.
        """
        if column.layout is Layout.per_token:
            tokens = self.columns[column.name]
            return tokens[inputs.packed_index.to(tokens.device)].to(self.device)
        values = self._values[column.name]
        rows = inputs.rows
        if column.per_prompt:
            rows = self._prompt_index[rows.cpu()].to(rows.device)
        return values[rows] if isinstance(values, Tensor) else [values[row] for row in rows.tolist()]

    def _add_per_token(self, name: str, values: np.ndarray | Tensor) -> None:
        if len(values) != self.num_tokens:
            raise ValueError(
                f"column {name!r} has {len(values)} tokens for lengths that sum to {self.num_tokens}"
            )
        on_host = name in _PLANNING_COLUMNS
        self.columns[name] = _tensor(values, torch.device("cpu") if on_host else self.device)

    @cached_property
    def runs(self) -> TokenRuns:
        """The samples' token runs."""
        return TokenRuns(self.lengths, self.columns.get(PARENT_GAPS.name))

    def num_outputs(self, schedule: Schedule) -> int:
        """The number of tokens, and with ends of token runs, for which a model can have an output."""
        return self.num_tokens + (len(self.runs) if schedule.with_ends else 0)

    def sum_per_sample(self, values: Tensor) -> Tensor:
        """Return the sum over each sample, [N], of a packed [sum of lengths] tensor on the host."""
        owner = torch.repeat_interleave(torch.arange(len(self)), self.lengths)
        return torch.zeros(len(self), dtype=values.dtype).index_add_(0, owner, values)

    def micro_batch(
        self, spec: MicroBatch, schedule: Schedule, context: ContextRank = WHOLE_CONTEXT
    ) -> ModelInputs:
        """Return the samples ``spec.rows`` in the schedule's layout, on the device: whole samples, or one
        context-parallel rank's part.

        The inputs have the samples' images where the batch has such columns. Raises ValueError when the
        samples do not fit into ``spec.padded_length`` tokens, or do not begin with the prompt that they
        should share.
        """
        if schedule.layout is MicroBatchLayout.padded:
            inputs = self._padded(spec, schedule)
        elif any(spec.shared) or PARENT_GAPS in self:
            inputs = self._forest(spec, schedule)
        else:
            inputs = self._packed(spec, schedule)
        if (images := self._images()) is not None:
            inputs = replace(inputs, images=images.of_rows(spec.rows, spec.shared))
        if (of_teacher := self.columns.get(TEACHER_TOPK_IDS)) is not None:
            inputs = replace(inputs, topk_ids=of_teacher[inputs.packed_index].to(torch.int64))
        return inputs.part(context).to(self.device)

    def place_images(self, rope_index: RopeIndex) -> None:
        """Compute position ids in time, height and width for later micro-batches, for a model that reads
        images.

        Does nothing for a batch without columns of images, or when it is called again.
        """
        if self._rope_positions is None and (images := self._images()) is not None:
            ids = self.columns[INPUT_IDS.name]
            self._rope_positions = images.rope_positions(ids, self.lengths, rope_index)

    def _images(self) -> BatchImages | None:
        return BatchImages.of(self._prompt_index.tolist(), self._values)

    def _positions(self, indexes: Tensor, positions: Tensor) -> Tensor:
        """Return the position ids of the tokens at ``indexes`` in the packed columns, whose indexes within
        their samples are ``positions``. Both are [*shape]; the result is [*shape], or [3, *shape] after
        ``place_images``."""
        if self._rope_positions is None:
            return positions
        return self._rope_positions[indexes].movedim(-1, 0)

    def _routes(self, indexes: Tensor, slots: Tensor, num_slots: int) -> Tensor | None:
        """Return the routed experts of the tokens at ``indexes`` in a row of ``num_slots`` slots, [num_slots,
        layers, k].

        Token i has the slot ``slots[i]``; unused slots have 0. Returns None in a batch without routed
        experts.
        """
        experts = self.columns.get(ROUTED_EXPERTS)
        if experts is None:
            return None
        return experts.new_zeros(num_slots, *experts.shape[1:]).index_copy_(0, slots, experts[indexes])

    def _padded(self, spec: MicroBatch, schedule: Schedule) -> ModelInputs:
        rows = torch.tensor(spec.rows, dtype=torch.int64)
        lengths = (self.lengths if schedule.with_ends else self._model_lengths)[rows]
        longest = int(lengths.max())
        if longest > spec.padded_length:
            raise ValueError(f"{longest} tokens of a sample are over the padded length {spec.padded_length}")
        positions = torch.arange(spec.padded_length)
        is_token = positions < lengths[:, None]
        indexes = (self.offsets[rows, None] + positions).masked_fill_(~is_token, 0)
        predicted, is_scored = self._outputs_of(indexes, rows[:, None], schedule)
        is_scored &= is_token
        sample_index, position = is_scored.nonzero(as_tuple=True)
        packed_index = predicted[sample_index, position]
        (slots,) = is_token.flatten().nonzero(as_tuple=True)
        routes = self._routes(indexes.flatten()[slots], slots, is_token.numel())
        return ModelInputs(
            input_ids=self._token_ids(indexes).masked_fill_(~is_token, PAD_TOKEN_ID),
            position_ids=self._positions(indexes, positions.expand(len(rows), -1)),
            token_ids=self._scored_ids(packed_index),
            output_index=position * len(rows) + sample_index,
            sample_index=sample_index,
            packed_index=packed_index,
            rows=rows,
            routes=None if routes is None else routes.unflatten(0, is_token.shape),
        )

    def _packed(self, spec: MicroBatch, schedule: Schedule) -> ModelInputs:
        rows, length_multiple = torch.tensor(spec.rows, dtype=torch.int64), schedule.length_multiple
        lengths = (self.lengths if schedule.with_ends else self._model_lengths)[rows]
        room = (lengths + length_multiple - 1) // length_multiple * length_multiple
        rest = spec.padded_length - int(room.sum())
        if rest < 0:
            raise ValueError(f"samples of {int(room.sum())} tokens do not fit into {spec.padded_length}")
        if rest:
            room = torch.cat((room, torch.tensor([rest])))
        starts = room.cumsum(0) - room
        sample = torch.repeat_interleave(torch.arange(len(rows)), lengths)
        position = torch.arange(len(sample)) - (lengths.cumsum(0) - lengths)[sample]
        indexes = self.offsets[rows][sample] + position
        slots = starts[sample] + position
        input_ids = torch.full((spec.padded_length,), PAD_TOKEN_ID)
        input_ids.index_copy_(0, slots, self._token_ids(indexes))
        positions = torch.arange(spec.padded_length) - torch.repeat_interleave(starts, room)
        if self._rope_positions is not None:
            positions = positions.repeat(3, 1)
            positions[:, slots] = self._positions(indexes, position)
        predicted, is_scored = self._outputs_of(indexes, rows[sample], schedule)
        packed_index = predicted[is_scored]
        routes = self._routes(indexes, slots, spec.padded_length)
        return ModelInputs(
            input_ids=input_ids[None],
            routes=None if routes is None else routes[None],
            position_ids=positions.unsqueeze(-2),
            token_ids=self._scored_ids(packed_index),
            output_index=slots[is_scored],
            sample_index=sample[is_scored],
            packed_index=packed_index,
            rows=rows,
            packing=Packing(
                cu_seqlens=functional.pad(room.cumsum(0), (1, 0)).to(torch.int32),
                lengths=tuple(room.tolist()),
            ),
        )

    def _forest(self, spec: MicroBatch, schedule: Schedule) -> ModelInputs:
        rows = torch.tensor(spec.rows, dtype=torch.int64)
        shared = spec.shared or (0,) * len(rows)
        self._check_shared(rows, torch.tensor(shared))
        num_entering = (self.lengths if schedule.with_ends else self._model_lengths)[rows].tolist()
        row = ForestRow.of([self.runs.forest(number) for number in spec.rows], shared, num_entering)
        unused = spec.padded_length - row.forest.num_tokens
        if unused < 0:
            raise ValueError(
                f"samples of {row.forest.num_tokens} tokens do not fit into {spec.padded_length}"
            )
        run_lengths = torch.tensor([run.length for run in row.forest.runs])
        sample, first_token = torch.tensor(row.origins).unbind(1)
        indexes = piece_indexes(self.offsets[rows][sample] + first_token, run_lengths)
        positions = self._positions(indexes, piece_indexes(torch.tensor(row.forest.depths()), run_lengths))
        packed_index, output_index, sample_index = self._forest_outputs(rows, row, schedule)
        routes = self._routes(indexes, torch.arange(len(indexes)), spec.padded_length)
        return ModelInputs(
            routes=None if routes is None else routes[None],
            input_ids=functional.pad(self._token_ids(indexes), (0, unused), value=PAD_TOKEN_ID)[None],
            position_ids=functional.pad(positions, (0, unused)).unsqueeze(-2),
            token_ids=self._scored_ids(packed_index),
            output_index=output_index,
            sample_index=sample_index,
            packed_index=packed_index,
            rows=rows,
            forest=row.forest,
        )

    def _forest_outputs(
        self, rows: Tensor, row: ForestRow, schedule: Schedule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each scored token its place in the packed columns, the slot of the output that predicts
        it, and its sample within the micro-batch, [M] int64 each; with ends, for each end of a run too."""
        outputs = torch.tensor(row.outputs)
        sample, first_token, num_tokens, first_slot, slot = outputs.unbind(1)
        predicted = piece_indexes(self.offsets[rows][sample] + first_token, num_tokens)
        before = piece_indexes(slot - 1, num_tokens)
        before[num_tokens.cumsum(0) - num_tokens] = first_slot
        is_scored = self.columns[RESPONSE_MASK.name][predicted].to(torch.bool)
        sample = torch.repeat_interleave(sample, num_tokens)
        scored = predicted[is_scored], before[is_scored], sample[is_scored]
        if not schedule.with_ends:
            return scored
        counts = self.runs.counts[rows]
        ends = (
            self.num_tokens + piece_indexes(self.runs.firsts[rows], counts),
            torch.tensor(row.end_slots),
            torch.repeat_interleave(torch.arange(len(rows)), counts),
        )
        tokens, slots, samples = (torch.cat(both) for both in zip(scored, ends, strict=True))
        return tokens, slots, samples

    def _check_shared(self, rows: Tensor, shared: Tensor) -> None:
        """Raise ValueError unless each of the samples ``rows`` begins with as many tokens of the sample
        before it as it should share, ``shared``, none of which is scored. Both are [n] int64."""
        starts = self.offsets[rows]
        own, before = piece_indexes(starts, shared), piece_indexes(starts.roll(1), shared)
        ids, mask = self.columns[INPUT_IDS.name], self.columns[RESPONSE_MASK.name]
        if not torch.equal(ids[own], ids[before]):
            raise ValueError("samples of one group begin with different tokens, so cannot share them")
        if bool(mask[own].any()) or bool(mask[before].any()):
            raise ValueError(f"{RESPONSE_MASK.name} marks a token that samples share")

    def _token_ids(self, indexes: Tensor) -> Tensor:
        return self.columns[INPUT_IDS.name][indexes].to(torch.int64)

    def _scored_ids(self, packed_index: Tensor) -> Tensor:
        """Return the ids of scored tokens; ends, which are none, get any."""
        return self._token_ids(packed_index.clamp(max=self.num_tokens - 1))

    def _outputs_of(self, indexes: Tensor, rows: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
        """Return for each token at ``indexes`` in the packed columns, of the samples ``rows``, which token
        the model's output there is for, as an index in these columns, and whether this output is used.

        The output is for the next token. A sample's last token has no next token; a schedule with ends uses
        the output there for the end of the sample.
        """
        following = indexes + 1
        is_end = following == (self.offsets + self.lengths)[rows]
        following = following.clamp(max=self.num_tokens - 1)
        is_scored = self.columns[RESPONSE_MASK.name][following].to(torch.bool)
        if not schedule.with_ends:
            return following, is_scored
        return torch.where(is_end, self.num_tokens + rows, following), is_end | is_scored


def empty_outputs(scoring: LogprobSettings | None, num_tokens: int, device: torch.device) -> list[Tensor]:
    """Return tensors of 0 for the model's outputs on a batch of T packed tokens and ends of runs: a value for
    each, [T] float32.

    With ``scoring.with_entropy`` a second such tensor follows; with ``scoring.top_k`` = k the most likely
    tokens' log-probs, [T, k] float32, and ids, [T, k] int32.
    """
    num_values = 2 if scoring is not None and scoring.with_entropy else 1
    outputs = [torch.zeros(num_tokens, dtype=torch.float32, device=device) for _ in range(num_values)]
    if scoring is not None and scoring.top_k:
        shape = (num_tokens, scoring.top_k)
        outputs += [torch.zeros(shape, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32)]
    return outputs


def keep_outputs(packed: Sequence[Tensor], outputs: Sequence[Tensor], inputs: ModelInputs) -> None:
    """Copy a micro-batch's ``outputs``, each [M, ...], to their tokens' positions in ``packed``."""
    for whole, part in zip(packed, outputs, strict=True):
        whole[inputs.packed_index] = part.to(whole.dtype)


def _tensor(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    with warnings.catch_warnings():
        # The data plane's arrays are read-only views; nothing here writes into a column.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(values, device=device)
