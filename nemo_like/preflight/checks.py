"""The slow checks before a run: data, a user's own code, and the layers that LoRA adapts.

    cfg ──▶ data_scan ─┐
        ──▶ targets    ├── each in a child process, all at once ──▶ problems, or notes for the plan
        ──▶ adapters  ─┘

``config.validation`` has the quick ones, which come first. This process loads nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_like.config.data_rules import is_here
from nemo_like.config.errors import ConfigError, Problem
from nemo_like.config.machine_rules import Machine
from nemo_like.config.model_info import shipped_shape
from nemo_like.config.schema import Config, DatasetConfig, DatasetKind, LoraConfig, PolicyBackend
from nemo_like.config.tasks import data_sources, max_prompt_tokens
from nemo_like.preflight import adapters, targets
from nemo_like.preflight.child import ChildCall, ChildFailed, ChildIsLate
from nemo_like.preflight.data_scan import ScanReport, ScanRequest, SourceToScan, scan
from nemo_like.preflight.notes import Note, Seen

_SCAN_TIME_S = 60.0
# What a child process may take beyond its work: imports, on a busy machine.
_START_TIME_S = 60.0
_IMPORT_TIME_S = 120.0

_Outcome = tuple[list[Problem], list[Note]]


@dataclass(frozen=True, slots=True)
class _Check:
    """Something that a child process looks at."""

    start: Callable[[], ChildCall]
    conclude: Callable[[ChildCall], _Outcome]  # waits for the answer


def preflight(cfg: Config, machine: Machine, say: Callable[[str], None]) -> list[Note]:
    """Make every slow check that this configuration, a valid one, gives reason to.

    ``say`` tells the user what takes so long. Raises ConfigError that lists everything for which the run
    would fail later.
    """
    problems: list[Problem] = []
    notes = [*_unseen(cfg, machine)]
    with ExitStack() as children:
        waiting = [(children.enter_context(check.start()), check.conclude) for check in _checks(cfg)]
        if waiting:
            say("looking at data and own code before anything starts")
        for child, conclude in waiting:
            found, told = conclude(child)
            problems += found
            notes += told
    if problems:
        raise ConfigError(problems)
    return sorted(notes, key=lambda note: [*Seen].index(note.seen))


def _checks(cfg: Config) -> Iterator[_Check]:
    if request := _scan_request(cfg):
        start = partial(ChildCall, scan, request, timeout_s=request.time_s + _START_TIME_S)
        yield _Check(start, partial(_scanned, request))
    for target in targets.targets_of(cfg):
        start = partial(ChildCall, targets.problem_of, target, timeout_s=_IMPORT_TIME_S)
        yield _Check(start, partial(_imported, target))
    lora, name = cfg.policy.fsdp_cfg.lora, cfg.policy.model_name
    if cfg.policy.backend is PolicyBackend.fsdp and lora.enabled and not cfg.rollout.generate_only:
        directory = name if Path(name).is_dir() else str(shipped_shape(name))
        start = partial(ChildCall, adapters.problem_of, directory, lora, timeout_s=_IMPORT_TIME_S)
        yield _Check(start, partial(_adapted, name, lora))


def _scan_request(cfg: Config) -> ScanRequest | None:
    """The sources that are on this machine and not made by ourselves; none for a replay, which reads none."""
    if cfg.rollout.replay is not None:
        return None
    sources = tuple(
        SourceToScan(
            key=key,
            cfg=source,
            split="train" if key.startswith("data.train") else "validation",
            env=cfg.env[source.env],
        )
        for key, source in data_sources(cfg)
        if is_here(source) and not _is_made_here(source)
    )
    if not sources:
        return None
    model = Path(cfg.policy.model_name)
    return ScanRequest(
        sources=sources,
        tokenizer=str(model) if model.is_dir() else None,
        chat_template=cfg.data.chat_template,
        max_prompt_tokens=max_prompt_tokens(cfg),
        time_s=_SCAN_TIME_S,
    )


def _is_made_here(source: DatasetConfig) -> bool:
    """Sums, whose lengths ``config.validation`` knows unless something is put around them."""
    is_plain = source.prompt_template is None and not source.use_chat_template
    return source.kind is DatasetKind.arithmetic and is_plain


def _scanned(request: ScanRequest, child: ChildCall) -> _Outcome:
    try:
        report: ScanReport = child.result()
    except ChildIsLate as error:
        return [], [Note(Seen.not_checked, f"{source.key}: {error}") for source in request.sources]
    except ChildFailed as error:
        keys = ", ".join(source.key for source in request.sources)
        return [Problem(key=keys, rule=f"cannot be read: {error}", remedy="")], []
    return list(report.problems), list(report.notes)


def _imported(target: targets.Target, child: ChildCall) -> _Outcome:
    try:
        rule = child.result()
    except ChildFailed as error:
        rule = f"cannot be imported: {error}"
    if rule is None:
        return [], [Note(Seen.checked, f"{target.key}: {target.path} can be imported and called so")]
    return [Problem(key=f"{target.key}={target.path}", rule=rule, remedy="")], []


def _adapted(model_name: str, lora: LoraConfig, child: ChildCall) -> _Outcome:
    key, names = "policy.fsdp_cfg.lora.target_modules", ", ".join(lora.target_modules)
    try:
        told = child.result()
    except ChildFailed as error:
        told = f"{key} could not be looked for in {model_name}: {error}"
    if told is None:
        return [], [Note(Seen.checked, f"{key}: the model has {names}")]
    return [Problem(key="", rule=told, remedy="")], []


def _unseen(cfg: Config, machine: Machine) -> Iterator[Note]:
    """What a plan for another machine takes for granted."""
    if machine is Machine.this:
        return
    name = cfg.policy.model_name
    if not Path(name).is_dir():
        yield Note(
            Seen.assumed,
            f"policy.model_name: {name} is not here; its sizes are those shipped in recipes/shapes",
        )
        yield Note(
            Seen.not_checked, f"policy.model_name: weights and tokenizer of {name}, so no prompt's length"
        )
    for key, source in data_sources(cfg):
        if not is_here(source):
            yield Note(Seen.not_checked, f"{key}: {source.path} is not here")
    yield Note(Seen.not_checked, "GPUs, memory and disk of the machines that will run it")
