"""Runs the slow checks before a run: of data, of the user's own code, and of the layers that LoRA adapts.

    cfg ──▶ data_scan ─┐
        ──▶ targets    ├── each in a child process, all at once ──▶ problems, or notes for the plan
        ──▶ models    ─┘

The quick checks of ``rules.rules`` come first. Whatever a slow check loads stays in its child process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from nemo_like.batch.columns import (
    TOKEN_ADVANTAGES,
    Column,
    Declaration,
    gather_columns,
)
from nemo_like.batch.recordings import read_manifest
from nemo_like.child_process.parent_side import ChildFailed, ChildIsLate
from nemo_like.config.problems import ConfigError, Problem, without_secrets
from nemo_like.configuration import Config
from nemo_like.data.options import DatasetConfig
from nemo_like.data.source_kind import is_here, source_kind_of
from nemo_like.data.sources import data_sources
from nemo_like.environments.hub_rules import has_interpreter
from nemo_like.environments.registry import kind_of, reward_model
from nemo_like.environments.shared_options import ModelOptions
from nemo_like.generation.speculation import ARGUMENT
from nemo_like.models.model_info import is_here as is_model_here
from nemo_like.models.model_info import model_of, planned_shape
from nemo_like.models.remote_code import allowing_code
from nemo_like.observability.software import installed_version
from nemo_like.plan.machine_rules import Machine
from nemo_like.plan.roles import worker_groups
from nemo_like.policy.backends.backend_kind import Library, backend_kind_of
from nemo_like.policy.backends.library_arguments import (
    PassedArguments,
    passed_to_engines,
    passed_to_workers,
)
from nemo_like.policy.batch.policy_columns import (
    dumped_columns,
    model_reads,
    policy_declarations,
    value_declarations,
)
from nemo_like.policy.batch.teacher_columns import num_most_likely, teacher_columns, teacher_declaration
from nemo_like.policy.groups.layout import adapters_of
from nemo_like.policy.options import Device, LoraConfig
from nemo_like.preflight import targets
from nemo_like.preflight.child import ChildCall
from nemo_like.preflight.data_scan import ScanReport, ScanRequest, SourceToScan, scan
from nemo_like.preflight.drafts import draft_notes
from nemo_like.preflight.engine_features import missing_engine_features
from nemo_like.preflight.loadable_models import loading_problems, models_with_code
from nemo_like.preflight.notes import Note, NoteStatus
from nemo_like.preflight.ray_packages import unloadable_ray_packages
from nemo_like.preflight.run_warnings import code_warnings, missing_kernels, staleness_warnings
from nemo_like.preflight.taken_arguments import engine_argument_problem, worker_argument_problem
from nemo_like.preflight.versions import untested_versions
from nemo_like.rollout.rollout_columns import forest_columns, recorded_declarations, rollout_declarations
from nemo_like.rollout.tasks import judging_environments, max_prompt_tokens, used_environments

_SCAN_TIME_S = 60.0
# Time for a child process's imports on a busy machine, beyond the time of its work.
_START_TIME_S = 60.0
_IMPORT_TIME_S = 120.0

_Outcome = tuple[list[Problem], list[Note]]


@dataclass(frozen=True, slots=True)
class _Check:
    """A check that runs in a child process."""

    start: Callable[[], ChildCall]
    conclude: Callable[[ChildCall], _Outcome]  # waits for the child's answer and judges it


@dataclass(frozen=True, slots=True)
class Preflight:
    """The results of the slow checks of a valid configuration."""

    notes: Sequence[Note]
    columns: tuple[Column, ...]  # of the whole run


def preflight(cfg: Config, machine: Machine, say: Callable[[str], None]) -> Preflight:
    """Run every slow check that a valid configuration needs, and return the results.

    ``say`` gets a line for each installed package outside the tested versions, for each kernel that training
    lacks, for stale samples that train without a correction, for code that checkpoints bring, and for the
    start of the checks. Raises
    ConfigError, which lists every problem found.
    """
    missing = missing_kernels(cfg) if machine is Machine.this else ()
    for line in (*untested_versions(), *missing, *staleness_warnings(cfg), *code_warnings(cfg)):
        say(f"warning: {line}")
    problems = []
    if machine is Machine.this:
        problems += [*unloadable_ray_packages(cfg), *missing_engine_features(cfg)]
    notes = [*_notes_on_another_machine(cfg, machine), *draft_notes(cfg)]
    declared: list[Declaration] = []
    with allowing_code(cfg.policy), ExitStack() as children:
        checks = _checks(cfg, machine, declared)
        waiting = [(children.enter_context(check.start()), check.conclude) for check in checks]
        if waiting:
            say("looking at data and own code before anything starts")
        for child, conclude in waiting:
            found, problem = conclude(child)
            problems += (one for one in found if one not in problems)
            notes += problem
    columns: tuple[Column, ...] = ()
    if not problems:
        try:
            columns = gather_columns(_declarations(cfg, declared))
        except ValueError as error:  # ColumnError, or a recording that cannot be read
            problems.append(Problem(key="", rule=str(error), remedy=""))
    problems += _more_tokens_than_there_are(cfg, columns)
    if problems:
        raise ConfigError(list(without_secrets(problems, cfg)))
    return Preflight(sorted(notes, key=lambda note: [*NoteStatus].index(note.status)), columns)


def _more_tokens_than_there_are(cfg: Config, columns: Sequence[Column]) -> Iterator[Problem]:
    """Yield a problem when a loss asks a teacher for more most likely tokens than the policy has tokens."""
    asked = num_most_likely(columns)
    if asked and asked > (vocab_size := model_of(cfg.policy).vocab_size):
        yield Problem(
            key=f"loss_fn.kind={cfg.loss_fn.kind}",
            rule=f"compares the {asked} most likely tokens of the teacher (top_k), and the policy has "
            f"{vocab_size} tokens",
            remedy=f"set loss_fn.top_k to at most {vocab_size}",
        )


def _declarations(cfg: Config, own: Sequence[Declaration]) -> list[Declaration]:
    """Return the declarations of columns of all parts of the run; ``own`` are those of the user's code."""
    if cfg.rollout.replay is not None:
        directory = Path(cfg.rollout.replay)
        parts = [*recorded_declarations(cfg.rollout.replay, read_manifest(directory))]
    else:
        environments = {
            one.part.removeprefix("env."): one.writes for one in own if one.part.startswith("env.")
        }
        parts = [*rollout_declarations(cfg, environments)]
    if not cfg.rollout.generate_only:
        of_loss = next((one.reads for one in own if one.part == "loss_fn"), ())
        inputs = forest_columns(cfg)
        if cfg.value is not None:
            parts += value_declarations(cfg.loss_fn, inputs)
            of_loss = (*of_loss, TOKEN_ADVANTAGES)
        dumped = dumped_columns(cfg.loss_fn, cfg.rollout)
        parts += policy_declarations(cfg.loss_fn, of_loss, (*model_reads(cfg.policy), *inputs), dumped)
        if cfg.teacher is not None and any(one.part == "loss_fn" for one in own):
            parts.append(teacher_declaration(teacher_columns(of_loss), inputs))
    return parts


def _checks(cfg: Config, machine: Machine, declared: list[Declaration]) -> Iterator[_Check]:
    """Yield the slow checks that a configuration needs.

    The check of the user's code appends the columns that this code declares to ``declared``.
    """
    if request := _scan_request(cfg):
        start = partial(ChildCall, scan, request, timeout_s=request.time_s + _START_TIME_S)
        yield _Check(start, partial(_conclude_scan, request))
    for target in targets.targets_of(cfg):
        start = partial(ChildCall, targets.inspected, target, timeout_s=_IMPORT_TIME_S)
        yield _Check(start, partial(_conclude_import, target, declared))
    for env, options in _reward_models(cfg).items():
        if machine is Machine.another and not Path(options.model_name).is_dir():
            continue
        start = partial(ChildCall, reward_model_problem, options, timeout_s=_IMPORT_TIME_S)
        yield _Check(start, partial(_conclude_reward_model, env, options))
    if cfg.policy.external_lib or models_with_code(cfg):
        start = partial(ChildCall, loading_problems, cfg, timeout_s=_IMPORT_TIME_S)
        yield _Check(start, partial(_conclude_loading, cfg))
    yield from _argument_checks(cfg, machine)
    for role, group in worker_groups(cfg).items():
        adapter_problem, lora = backend_kind_of(group).adapter_problem, adapters_of(group)
        if adapter_problem is not None and lora is not None:
            name = group.model_name
            directory = name if is_model_here(name) else str(planned_shape(name))
            start = partial(ChildCall, adapter_problem, directory, role.group, lora, timeout_s=_IMPORT_TIME_S)
            yield _Check(start, partial(_conclude_adapters, role.group, name, lora))


def _argument_checks(cfg: Config, machine: Machine) -> Iterator[_Check]:
    """Yield the checks of the arguments that are passed on to vLLM and to the trainer's library."""
    is_like_this = machine is Machine.this or cfg.policy.device is Device.cpu
    is_here = is_like_this and is_model_here(cfg.policy.model_name)
    for passed in passed_to_engines(cfg.generation):
        asked = (engine_argument_problem, cfg, passed, is_here)
        start = partial(ChildCall, *asked, timeout_s=_IMPORT_TIME_S)
        yield _Check(start, partial(_conclude_arguments, passed, "vllm", is_judged=is_here))
    for role, group in worker_groups(cfg).items():
        for passed in passed_to_workers(role.group, group):
            is_of_transformers = passed.library is Library.transformers
            if is_of_transformers and not is_model_here(group.model_name):
                continue
            library = "transformers" if is_of_transformers else "megatron-core"
            start = partial(ChildCall, worker_argument_problem, group, passed, timeout_s=_IMPORT_TIME_S)
            yield _Check(start, partial(_conclude_arguments, passed, library, is_judged=True))


def _reward_models(cfg: Config) -> dict[str, ModelOptions]:
    """Return the options of each reward model that the run uses, by environment; empty in a replay."""
    used = used_environments(cfg) if cfg.rollout.replay is None else {}
    found = {name: reward_model(env) for name, env in used.items()}
    return {name: options for name, options in found.items() if options is not None}


def _scan_request(cfg: Config) -> ScanRequest | None:
    """Return the request to scan the data sources on this machine; None when there is nothing to scan.

    Plain arithmetic is not scanned, and a replay reads no sources.
    """
    if cfg.rollout.replay is not None:
        return None
    model = cfg.policy.model_name
    sources, unread = [], []
    for key, source in data_sources(cfg.data):
        to_scan = SourceToScan(
            key=key,
            cfg=source,
            split="train" if key.startswith("data.train") else "validation",
            environments=judging_environments(cfg, source.env),
            num_drawn=_num_drawn(cfg, source),
        )
        if is_here(source) and not _is_made_here(source) and not _is_made_elsewhere(cfg, source):
            sources.append(to_scan)
        elif is_model_here(model) and _begins_messages(cfg, source):
            unread.append(to_scan)
    if not sources and not unread:
        return None
    return ScanRequest(
        sources=tuple(sources),
        unread=tuple(unread),
        tokenizer=model if is_model_here(model) else None,
        chat_template=cfg.data.chat_template,
        max_prompt_tokens=max_prompt_tokens(cfg),
        time_s=_SCAN_TIME_S,
    )


def _num_drawn(cfg: Config, source: DatasetConfig) -> float:
    """Return how many prompts the run's steps draw from a source of training on average; 0 for others.

    Steps that sample again (``grpo.use_dynamic_sampling``) draw more.
    """
    if not any(source is one for one in cfg.data.train):
        return 0
    share = source.weight / sum(one.weight for one in cfg.data.train)
    return cfg.grpo.max_num_steps * cfg.grpo.num_prompts_per_step * share


def _is_made_here(source: DatasetConfig) -> bool:
    """Return whether the source generates its prompts from its keys. These give the prompts' lengths, so
    ``rules.rules`` has checked them, and no data need be read."""
    is_plain = source.prompt_template is None and not source.use_chat_template
    return source_kind_of(source).lengths is not None and is_plain


def _begins_messages(cfg: Config, source: DatasetConfig) -> bool:
    """Return whether the policy gets messages, rather than plain text, for every record of a source."""
    return source.use_chat_template or kind_of(cfg.env[source.env]).calls_policy


def _is_made_elsewhere(cfg: Config, source: DatasetConfig) -> bool:
    """Return whether a package makes the source's problems with an interpreter that this machine lacks."""
    return source_kind_of(source).asks_environment and not has_interpreter(cfg.env[source.env])


def _conclude_scan(request: ScanRequest, child: ChildCall) -> _Outcome:
    try:
        report: ScanReport = child.result()
    except ChildIsLate as error:
        return [], [Note(NoteStatus.not_checked, f"{source.key}: {error}") for source in request.sources]
    except ChildFailed as error:
        keys = ", ".join(source.key for source in request.sources)
        return [Problem(key=keys, rule=f"cannot be read: {error}", remedy="")], []
    return list(report.problems), list(report.notes)


def _conclude_import(target: targets.Target, declared: list[Declaration], child: ChildCall) -> _Outcome:
    try:
        seen: targets.Inspected = child.result()
    except ChildFailed as error:
        seen = targets.Inspected(f"cannot be imported: {error}")
    rule = seen.problem
    if seen.columns is not None:
        declared.append(seen.columns)
    if rule is None:
        return [], [
            Note(
                NoteStatus.checked, f"{target.key}: {target.path} can be imported, and takes these arguments"
            )
        ]
    return [Problem(key=f"{target.key}={target.path}", rule=rule, remedy="")], []


def _conclude_loading(cfg: Config, child: ChildCall) -> _Outcome:
    loaded = [*cfg.policy.external_lib, *models_with_code(cfg)]
    try:
        problems = child.result()
    except ChildFailed as error:
        problems = [Problem(key=", ".join(loaded), rule=f"could not be loaded: {error}", remedy="")]
    return problems, [] if problems else [Note(NoteStatus.checked, f"{', '.join(loaded)}: can be loaded")]


def _conclude_reward_model(env: str, options: ModelOptions, child: ChildCall) -> _Outcome:
    prefix = f"env.{env}.options"
    try:
        problem = child.result()
    except ChildFailed as error:
        problem = f"model_name={options.model_name} could not be looked at: {error}"
    if problem is None:
        return [], [Note(NoteStatus.checked, f"{prefix}.model_name: a reward model with a tokenizer")]
    return [Problem(key="", rule=f"{prefix}.{problem}", remedy="")], []


def _conclude_arguments(
    passed: PassedArguments, library: str, child: ChildCall, *, is_judged: bool
) -> _Outcome:
    try:
        problem = child.result()
    except ChildFailed as error:
        problem = f"could not be looked at: {error}"
    if problem is not None:
        rule, _, remedy = problem.partition("; ")
        return [Problem(key=f"{passed.key}={{{_shown(passed.values)}}}", rule=rule, remedy=remedy)], []
    # Speculative decoding has a note of its own.
    shown = _shown({name: value for name, value in passed.values.items() if name != ARGUMENT})
    if not shown:
        return [], []
    took = "takes them" if is_judged else "knows them, and judges their values at the start"
    return [], [
        Note(
            NoteStatus.not_checked,
            f"{passed.key}: {shown}; {library} {installed_version(library)} {took}, and no test of this "
            "project covers what they do",
        )
    ]


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def _conclude_adapters(group: str, model_name: str, lora: LoraConfig, child: ChildCall) -> _Outcome:
    key, names = f"{group}.lora.target_modules", ", ".join(lora.target_modules)
    try:
        problem = child.result()
    except ChildFailed as error:
        problem = f"{key} could not be looked for in {model_name}: {error}"
    if problem is None:
        return [], [Note(NoteStatus.checked, f"{key}: the model has {names}")]
    return [Problem(key="", rule=problem, remedy="")], []


def _near(path: Path) -> str:
    """Return a guess at the file that was meant, where the folder has one of nearly the same name."""
    there = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, there, n=1, cutoff=0.8)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _notes_on_another_machine(cfg: Config, machine: Machine) -> Iterator[Note]:
    """Yield notes on what a plan for another machine assumes, or could not check here."""
    if machine is Machine.this:
        return
    named = {
        "policy": (cfg.policy, "no prompt's length"),
        "value": (cfg.value, "not whether it has the policy's vocabulary"),
        "teacher": (cfg.teacher, "not whether it has the policy's vocabulary"),
    }
    for group, (of_group, unknown) in named.items():
        if of_group is None or is_model_here(name := of_group.model_name):
            continue
        key = f"{group}.model_name"
        is_sizes = Path(name).is_dir()
        how = "has config.json alone" if is_sizes else "is not here"
        whose = "in it" if is_sizes else "shipped in recipes/shapes"
        yield Note(NoteStatus.assumed, f"{key}: {name} {how}; its sizes are those {whose}")
        yield Note(NoteStatus.not_checked, f"{key}: weights and tokenizer of {name}, so {unknown}")
    for key, source in data_sources(cfg.data):
        if not is_here(source):
            near = _near(Path(str(source.path)))
            yield Note(NoteStatus.not_checked, f"{key}: {source.path} is not here{near}")
    for env, options in _reward_models(cfg).items():
        if not Path(options.model_name).is_dir():
            text = f"env.{env}.options.model_name: {options.model_name} is not here"
            yield Note(NoteStatus.not_checked, text)
    yield Note(NoteStatus.not_checked, "GPUs, memory and disk of the machines that will run it")


def reward_model_problem(options: ModelOptions) -> str | None:
    """Return why a checkpoint is no usable reward model; None when it seems to be one.

    Reads its configuration and its tokenizer. Runs in a child process.
    """
    from nemo_like.environments.reward_model import ConversationEncoder

    try:
        ConversationEncoder(options)
    except ValueError as error:
        return str(error)
    return None
