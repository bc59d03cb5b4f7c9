"""Checks every record before a run, as far as the time allows: can it be read, asked and judged?

The scan runs in a child process, so that the parent does not load libraries that read Parquet and count
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from nemo_like.config.import_path import load_by_path
from nemo_like.config.problems import Problem
from nemo_like.data.images import ImageError
from nemo_like.data.interface import Split, TaskPrompt
from nemo_like.data.options import DatasetConfig, source_name
from nemo_like.data.source_kind import source_kind_of
from nemo_like.environments.kind import RecordCheck
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import record_check_of
from nemo_like.models.remote_code import needs_trust, untrusted
from nemo_like.preflight.conversations import ConversationCheck
from nemo_like.preflight.notes import Note, NoteStatus
from nemo_like.rollout.rollout_columns import unfit_values

if TYPE_CHECKING:
    from nemo_like.data.encoder import PromptEncoder

# How many records are read, and their tokens counted, between two checks of the deadline.
_BATCH = 1000
_IMAGE_BATCH = 50
_MAX_PROBLEMS = 3
# How many prompts that are too long are told apart.
_MAX_PLACES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceToScan:
    """One data source, and the environments that judge its prompts."""

    key: str  # data.train, or data.train[1]
    cfg: DatasetConfig
    split: Split
    environments: Mapping[str, EnvConfig]  # by name
    num_drawn: float = 0  # prompts that the run's steps draw from it, at least; 0 for a validation


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRequest:
    """What to scan, and for how long. ``tokenizer`` is a checkpoint's directory; None if it is not here."""

    sources: tuple[SourceToScan, ...]
    tokenizer: str | None
    chat_template: str | None
    max_prompt_tokens: int
    time_s: float  # for all sources together
    unread: tuple[SourceToScan, ...] = ()  # only their conversations are rendered, no record is read


@dataclass(frozen=True, slots=True)
class ScanReport:
    """The problems and notes of a scan of all sources."""

    problems: tuple[Problem, ...]
    notes: tuple[Note, ...]


def scan(request: ScanRequest) -> ScanReport:
    """Scan the sources one after the other; each gets an equal part of the time that is left.

    A tokenizer that cannot be loaded is a problem, and the records are then scanned without lengths.
    """
    end_s = time.monotonic() + request.time_s
    problems: list[Problem] = []
    notes: list[Note] = []
    encoder = None
    if request.tokenizer is not None:
        try:
            encoder = _encoder(request.tokenizer, request.chat_template, request.max_prompt_tokens)
        except Exception as error:
            problems.append(_unloadable(request.tokenizer, error))
    for index, source in enumerate(request.sources):
        now_s = time.monotonic()
        until_s = now_s + (end_s - now_s) / (len(request.sources) - index)
        conversations = None if encoder is None else _conversations(source, encoder)
        scanned = _Scan(source, request.max_prompt_tokens, encoder, conversations, until_s)
        scanned.run()
        problems += scanned.problems
        notes += scanned.notes()
    if encoder is not None:
        for check in [_conversations(source, encoder) for source in request.unread]:
            problems += check.check_agent()
            problems += check.check_made_up_prompt()
            notes += check.notes
    if encoder is not None and (unread := sorted(encoder.tokenizer.unread_fields)):
        text = (
            f"the chat template leaves out {', '.join(unread)} of some prompts; the policy does not read it"
        )
        notes.append(Note(NoteStatus.checked, f"data: {text}"))
    # Several sources may name one environment.
    return ScanReport(tuple(dict.fromkeys(problems)), tuple(dict.fromkeys(notes)))


def _unloadable(checkpoint: str, error: Exception) -> Problem:
    if needs_trust(error):
        return untrusted("policy.model_name", checkpoint)
    return Problem(
        key=f"policy.model_name={checkpoint}",
        rule=f"has a tokenizer that cannot be loaded: {type(error).__name__}: {error}",
        remedy="save the tokenizer there again with save_pretrained, or download it again",
    )


def _encoder(checkpoint: str, chat_template: str | None, max_prompt_tokens: int) -> PromptEncoder:
    from nemo_like.data.encoder import PromptEncoder

    return PromptEncoder(checkpoint, chat_template, max_prompt_tokens)


def _conversations(source: SourceToScan, encoder: PromptEncoder) -> ConversationCheck:
    env = source.environments.get(source.cfg.env)
    return ConversationCheck(source.key, source.cfg, env, encoder.tokenizer)


@dataclass(slots=True)
class _Scan:
    """The scan of one source, with its results so far."""

    source: SourceToScan
    max_prompt_tokens: int
    encoder: PromptEncoder | None
    conversations: ConversationCheck | None  # None without an encoder
    until_s: float  # on the monotonic clock
    problems: list[Problem] = field(default_factory=list)
    num_read: int = 0
    num_too_long: int = 0
    too_long: list[str] = field(default_factory=list)  # the places of the first of these
    longest: int = 0  # tokens of the longest prompt
    is_whole: bool = False
    not_here: str = ""  # why no record could be read, if that is no problem

    def run(self) -> None:
        """Read records until the source ends, the deadline passes, or ``_MAX_PROBLEMS`` problems are found.

        The deadline is checked after every ``_BATCH`` records, or every ``_IMAGE_BATCH`` records with images.
        """
        if self.conversations is not None:
            self.problems += self.conversations.check_agent()
        try:
            checks = {name: record_check_of(env) for name, env in self.source.environments.items()}
            examples = _task_prompts(self.source)
            size = _BATCH if self.source.cfg.images_key is None else _IMAGE_BATCH
            while batch := list(islice(examples, size)):
                self._look_at(batch, checks)
                if time.monotonic() > self.until_s or len(self.problems) >= _MAX_PROBLEMS:
                    return
            self.is_whole = True
        except ConnectionError as error:
            self.not_here = f"{self.source.cfg.path} is not on this machine ({type(error).__name__})"
        except Exception as error:
            self._found(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            return
        self._judge()

    def _look_at(self, batch: Sequence[tuple[str, TaskPrompt]], checks: Mapping[str, RecordCheck]) -> None:
        for (where, example), (name, check) in product(batch, checks.items()):
            try:
                check(example)
            except ValueError as error:
                self._found(f"{where}: env.{name} cannot judge it: {error}")
                if len(self.problems) >= _MAX_PROBLEMS:
                    return
        lengths: Sequence[int | None] = [None] * len(batch)
        if self.encoder is not None and self._can_be_rendered(batch):
            lengths = self._counted(self.encoder, batch)
        for (where, example), length in zip(batch, lengths, strict=True):
            for unfit in unfit_values(self.source.cfg, example, length):
                self._found(f"{where}: {unfit}")
        self.num_read += len(batch)

    def _can_be_rendered(self, batch: Sequence[tuple[str, TaskPrompt]]) -> bool:
        if self.conversations is None:
            return False
        for where, example in batch:
            self.problems += self.conversations.check_prompt(where, example)
        return not self.conversations.has_refused

    def _counted(
        self, encoder: PromptEncoder, batch: Sequence[tuple[str, TaskPrompt]]
    ) -> Sequence[int | None]:
        """Return the number of tokens of each prompt; None for a prompt with an unusable image."""
        usable = [self._has_usable_images(encoder, example) for _, example in batch]
        counted = iter(
            encoder.lengths(
                [example for (_, example), is_usable in zip(batch, usable, strict=True) if is_usable]
            )
        )
        counts = [next(counted) if is_usable else None for is_usable in usable]
        lengths = [count for count in counts if count is not None]
        for (where, _), length in zip(batch, counts, strict=True):
            if length is not None and length > self.max_prompt_tokens and len(self.too_long) < _MAX_PLACES:
                self.too_long.append(where)
            if length == 0:
                self._found(f"{where}: the tokenizer makes no token of its prompt")
        self.num_too_long += sum(length > self.max_prompt_tokens for length in lengths)
        self.longest = max(self.longest, 0, *lengths)
        return counts

    def _has_usable_images(self, encoder: PromptEncoder, example: TaskPrompt) -> bool:
        try:
            encoder.check_images(example)
        except ImageError as error:
            self._found(str(error))
            return False
        return True

    def _judge(self) -> None:
        if self.is_whole and not self.num_read:
            self._found("it holds no problems")
        elif self.is_whole and self.num_too_long == self.num_read:
            self._found(
                f"all {self.num_read} prompts have more than {self.max_prompt_tokens} tokens; raise "
                "policy.max_total_sequence_length (and data.max_input_seq_length, where set)"
            )

    def _found(self, what: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            key = f"{self.source.key}.path={self.source.cfg.path}"
            self.problems.append(Problem(key=key, rule=f"cannot be used: {what}", remedy=""))

    def notes(self) -> Iterator[Note]:
        """Yield notes on the records that were read."""
        key, name = self.source.key, self.source.cfg.path or source_name(self.source.cfg)
        if self.not_here:
            yield Note(NoteStatus.not_checked, f"{key}: {self.not_here}")
            return
        how_many = f"all {self.num_read:,}" if self.is_whole else f"the first {self.num_read:,}"
        text = f"{key}: {how_many} problems of {name}"
        if self.encoder is not None:
            text += f", of {self.longest:,} prompt tokens at most"
        if self.num_too_long:
            text += f"; {self.num_too_long:,} of more than {self.max_prompt_tokens:,} are left out"
        if self.is_whole and self.source.num_drawn and (num_kept := self.num_read - self.num_too_long):
            epochs = self.source.num_drawn / num_kept
            text += f"; the run's steps draw {self.source.num_drawn:,.0f}, which is {_short(epochs)} epochs"
        yield Note(NoteStatus.checked, text, tuple(self.too_long))
        yield from self.conversations.notes if self.conversations is not None else ()
        if not self.is_whole and not self.problems:
            yield Note(
                NoteStatus.not_checked,
                f"{key}: the problems of {name} after these, for which there was no time",
            )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def _task_prompts(source: SourceToScan) -> Iterator[tuple[str, TaskPrompt]]:
    """Yield the place of each record, and the prompt that the policy will get for it.

    Sources that can be streamed are streamed; any other dataset is built before its first record.
    """
    from nemo_like.data.datasets import build_dataset
    from nemo_like.data.mixture import templated
    from nemo_like.environments.environment_data import EnvironmentPrompts

    cfg, environments = source.cfg, EnvironmentPrompts(source.environments)
    if (path := source_kind_of(cfg).stream) is not None:
        tools = environments.tools(cfg.env)
        for where, example in load_by_path(path)(cfg):
            yield where, templated(example, cfg, tools)
        return
    problems: Any = build_dataset(cfg, source.split, environments)
    for index in range(len(problems)):
        yield f"{source_name(cfg)}, problem {index}", problems[index]
