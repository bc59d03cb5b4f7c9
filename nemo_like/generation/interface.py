"""The interface of a generation engine: its requests (token ids) and results (token ids and log-probs).

It also has the protocols of an engine and of an engine's side of a weight transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nemo_like.batch.columns import POLICY_VERSIONS
from nemo_like.cluster.actor_errors import Overdue
from nemo_like.cluster.stage import EngineHolds
from nemo_like.data.interface import Prompt
from nemo_like.generation.options import WeightTransport
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.tripwires.options import Tripwires
from nemo_like.weight_transport.buckets import TensorSpec
from nemo_like.weight_transport.connections import Endpoint, Transfer

if TYPE_CHECKING:
    from nemo_like.weight_transport.process_groups import GroupAddress


# Column -> (number of values of each response, the values of all responses).
_Joined = Mapping[str, tuple[list[int], np.ndarray]]


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One prompt, and a seed for each of its responses: response j is sampled with ``seeds[j]``.

    Raises ValueError when ``prompt_ids`` is empty, and unless the seeds are consecutive and within
    [0, 2**63): the engine serves a group as one request, and samples its j-th response with the first
    seed + j.
    """

    request_id: str  # unique among the unfinished requests of an engine
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    images: tuple[bytes, ...] = ()  # files; for each, prompt_ids repeat the image token
    num_known: int = 0  # how many first tokens of prompt_ids need no ``context_columns``
    said: Prompt | None = None  # what prompt_ids encode; for engines that ask a server

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.request_id!r}: prompt_ids is empty; it needs at least one token")
        first, count = self.seeds[0] if self.seeds else 0, len(self.seeds)
        if not count or self.seeds != tuple(range(first, first + count)) or not 0 <= first < 2**63 - count:
            raise ValueError(
                f"request {self.request_id!r}: seeds={self.seeds[:4]}... must be consecutive integers "
                "within [0, 2**63), one per response; use first, first + 1, ..."
            )


# Columns of the responses to a call that asks for the most likely tokens: [L, k] ids and log-probs, the most
# likely first.
TOP_TOKEN_IDS = "top_token_ids"
TOP_LOGPROBS = "top_logprobs"
# Column of the responses to a call with structured outputs: [L] uint8, 1 on tokens that the mask forced.
FORCED = "forced"


@dataclass(frozen=True, slots=True)
class CallSampling(SamplingSettings):
    """How the response to one call of an agent is sampled."""

    num_top_logprobs: int = 0  # k of the response's columns top_token_ids and top_logprobs; 0: without them


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response. token_ids: [L] int32, the stop token included; logprobs: [L] float32, nats."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    is_truncated: bool  # whether the response ran into max_new_tokens
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # further ``engine_columns``, by name
    # The same columns for the tokens of the request's prompt from ``num_known`` on.
    context_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    text: str | None = None  # what a server answered; None: what token_ids decode to

    def continued(self, rest: Response) -> Response:
        """Return this response continued by ``rest``, the response to a request whose prompt ended with this
        response's tokens.

        An engine has not read the last token that it sampled, so this response's columns of read tokens lack
        a value for it. ``rest`` has that value as its only context.
        """
        columns = {}
        for name, values in self.columns.items():
            context = rest.context_columns.get(name)
            read = values if context is None else np.concatenate([values[:-1], context])
            columns[name] = np.concatenate([read, rest.columns[name]])
        return Response(
            np.concatenate([self.token_ids, rest.token_ids]),
            np.concatenate([self.logprobs, rest.logprobs]),
            rest.is_truncated,
            columns,
            self.context_columns,
        )


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The oldest and the newest policy version that sampled a token of a response; often the same one."""

    oldest: int
    newest: int


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The responses to one request.

    ``policy_version`` is the version in force when the group was finished; -1 is the checkpoint as loaded.
    This version sampled all tokens, unless the engine takes weights while samples are under way: then each
    response has a column ``policy_versions`` with the version that sampled each token.
    """

    request_id: str
    responses: tuple[Response, ...]  # in the order of the request's seeds
    policy_version: int
    weights_digest: int | None = None  # digest of these weights as they arrived; None without tripwires

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Return for each response the oldest and the newest policy version that sampled a token of it."""
        columns = [response.columns.get(POLICY_VERSIONS.name) for response in self.responses]
        return tuple(
            VersionSpan(self.policy_version, self.policy_version)
            if versions is None
            else VersionSpan(int(versions.min()), int(versions.max()))
            for versions in columns
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arrays of all responses joined; pickling small arrays one by one costs more than
        sampling."""
        lengths = [len(response.token_ids) for response in self.responses]
        token_ids = np.concatenate([response.token_ids for response in self.responses])
        logprobs = np.concatenate([response.logprobs for response in self.responses])
        is_truncated = [response.is_truncated for response in self.responses]
        columns = _joined([response.columns for response in self.responses])
        context = _joined([response.context_columns for response in self.responses])
        texts = [response.text for response in self.responses]
        packed = (lengths, is_truncated, token_ids.tobytes(), logprobs.tobytes(), columns, context, texts)
        return _unpack_result, (self.request_id, self.policy_version, self.weights_digest, *packed)


def _unpack_result(
    request_id: str,
    policy_version: int,
    weights_digest: int | None,
    lengths: list[int],
    is_truncated: list[bool],
    token_bytes: bytes,
    logprob_bytes: bytes,
    columns: _Joined,
    context: _Joined,
    texts: list[str | None],
) -> GroupResult:
    token_ids = np.frombuffer(bytearray(token_bytes), np.int32)
    logprobs = np.frombuffer(bytearray(logprob_bytes), np.float32)
    responses, start = [], 0
    count = len(lengths)
    more = zip(_divided(columns, count), _divided(context, count), texts, strict=True)
    for length, truncated, others in zip(lengths, is_truncated, more, strict=True):
        end = start + length
        responses.append(Response(token_ids[start:end], logprobs[start:end], truncated, *others))
        start = end
    return GroupResult(request_id, tuple(responses), policy_version, weights_digest)


def _joined(columns: Sequence[Mapping[str, np.ndarray]]) -> _Joined:
    """Join the values of responses that have the same columns."""
    return {
        name: ([len(one[name]) for one in columns], np.concatenate([one[name] for one in columns]))
        for name in columns[0]
    }


def _divided(joined: _Joined, count: int) -> list[dict[str, np.ndarray]]:
    """Divide joined values again: return the columns of each of ``count`` responses."""
    divided: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    for name, (lengths, values) in joined.items():
        parts = np.split(values, np.cumsum(lengths)[:-1])
        for columns, part in zip(divided, parts, strict=True):
            columns[name] = part
    return divided


class GenerationError(RuntimeError):
    """The engine failed: its unfinished requests are lost, and it accepts no others."""


class EngineOverdue(GenerationError, Overdue):
    """The engine did not answer in time."""


class ResultSink(Protocol):
    """Takes an engine's results; an ``ActorHandle`` is one. ``submit`` returns at once.

    The engine calls ``submit("on_groups", list[GroupResult])`` once for each engine step in which groups
    finish, and ``submit("on_engine_error", engine_name, message)`` when it fails.
    """

    def submit(self, method: str, /, *args: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's present policy version, and totals since the engine started."""

    policy_version: int
    generation_s: float  # seconds in which sequences were being decoded
    num_generated_tokens: int  # of delivered responses
    idle_s: float = 0.0  # seconds without anything to decode, and without waiting for weights
    paused_s: float = 0.0  # seconds from when it stopped for weights until they were loaded
    draining_s: float = 0.0  # seconds of generation_s in which samples ended and none began, for weights
    tokens_by_version: Mapping[int, int] = field(default_factory=dict)  # of num_generated_tokens
    # Drafts of the delivered responses, tokens in these drafts, and draft tokens that were kept.
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_kept_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WeightAddress:
    """Where the engines' workers connect to get the weights that one policy worker sends."""

    transport: WeightTransport  # never auto
    endpoint: Endpoint
    process_group: GroupAddress | None = None  # of a collective transport


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """The weights that one policy worker sends, and how one engine's workers get them."""

    name: str
    address: WeightAddress
    first_rank: int  # the first of the consecutive ranks that this engine's workers take in a process group
    bucket_bytes: int
    tensors: tuple[TensorSpec, ...]  # Hugging Face names, in the order they are sent
    delta: bool = False  # whether only changed values are sent, after a first transfer of all
    adapter: Mapping[str, Any] | None = None  # peft's adapter_config.json, where the tensors are adapters
    tripwires: Tripwires = Tripwires.off  # in which transfers the engine computes the digest of the tensors


@dataclass(frozen=True, slots=True)
class WeightEndpoint:
    """What the trainer must know of an engine before the two connect."""

    node_id: str  # Ray's id of the engine's node; "" outside Ray, and of an engine over several nodes
    num_workers: int


@dataclass(frozen=True, slots=True)
class EngineJournal:
    """The journal file that an engine shall write from now on, and perhaps another journal whose events it
    shall replay first. A journal begins where the engine has no requests."""

    path: str
    replayed: str | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The log-probs (nats) of all T tokens of some sequences, packed one sequence after the other.

    Nothing predicts a sequence's first token, so its values are 0.
    """

    logprobs: np.ndarray  # [T] float32
    topk_ids: np.ndarray  # [T, k] int32, the most likely tokens at each position, most likely first
    topk_logprobs: np.ndarray  # [T, k] float32


class GenerationEngine(Protocol):
    """One engine that samples responses. The sink gets each group's result when the group is finished."""

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingSettings, sink: ResultSink) -> None:
        """Queue the requests; the sink gets each group's result after the engine step that finishes it.

        Raises ValueError when a request cannot be served; then none of this call's requests is queued.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests, so that their groups are never delivered. Unknown and finished ids are ignored."""

    def abort_all(self) -> None:
        """Abort every unfinished request, whoever made it, and stop replaying a journal. Raises
        GenerationError in a failed engine."""

    def stats(self) -> EngineStats: ...

    def hold(self, what: EngineHolds) -> None:
        """Hold exactly this part of the device's memory from now on, and leave the rest to others.

        An engine generates while it holds everything, and loads weights unless it holds nothing. Raises
        RuntimeError for an engine that was not started to sleep, or that still generates.
        """


class JournalingEngine(Protocol):
    """An engine that can write a journal of its requests and weights, and replay one."""

    def open_journal(self, journal: EngineJournal) -> None:
        """Write a new journal from now on; first replay the events of ``journal.replayed``, if that is given.

        Steps count from here. Raises RuntimeError while requests are unfinished, ValueError without
        ``weight_updates``, JournalError when the journal to replay cannot be read or was written under other
        settings, and DiskFull or OSError.
        """

    def flush_journal(self) -> None:
        """Write the journal's events so far to its file. Raises DiskFull or OSError."""


class ScoringEngine(Protocol):
    """An engine that says how likely given tokens are. Raises RuntimeError while requests are unfinished."""

    def canary_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probs of all tokens but the first, at temperature 1, nats."""

    def score(self, sequences: Sequence[Sequence[int]], top_k: int) -> PromptScores:
        """Return the log-probs of all tokens of the sequences, at temperature 1, and the ``top_k`` most
        likely tokens at each position.

        Raises ValueError for a sequence without tokens, or as long as the engine's limit or longer.
        """


class WeightReceiver(Protocol):
    """An engine's side of a weight transfer. The trainer makes all calls.

    It calls ``join_weight_group`` once for each group; then, for each version, ``pause``, ``fetch_weights``
    and ``load_weights``. Before ``load_weights`` it may give the version up and call ``resume`` instead: the
    engine then goes on with the version in force.
    """

    def weight_endpoint(self) -> WeightEndpoint: ...

    def join_weight_group(self, group: WeightGroup) -> None:
        """Begin to join the group and return at once; the trainer's side waits until all have joined."""

    def pause(self, version: int) -> None:
        """Stop sampling until ``version`` is loaded or ``resume`` is called.

        The engine may have ``version`` already, since a trainer that connects anew sends to all engines. An
        engine with ``weight_updates`` returns when it runs no step any more: at once, or when the samples
        that have begun have ended. Raises ValueError for an older version, EngineOverdue when that takes too
        long, and RuntimeError while requests are unfinished in an engine without ``weight_updates``.
        """

    def fetch_weights(self, transfer: Transfer, groups: Sequence[str]) -> None:
        """Wait for the tensors that the trainer offers in these groups before the load. Changes no weight."""

    def load_weights(self, version: int, groups: Sequence[str]) -> int:
        """Load every tensor of these groups, commit the version, resume sampling, and return the version.

        When it fails, the engine serves no more requests, since its weights are then a mix of versions.
        """

    def resume(self, transfer: Transfer) -> int:
        """Give the transfer up, go on sampling with the version in force, and return that version."""
