"""The keys of the group ``logger``: what a run shows and writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.config.kinds import Kinds
from nemo_like.observability.logger_kind import LoggerKind

LOGGER_KINDS = Kinds(
    "nemo_like.observability.logger_kinds",
    "logger",
    "nemo_like.observability.logger_kind:LoggerKind",
    "options",
)


class ConsoleMode(Enum):
    """How progress is shown. ``auto`` is ``live`` on a terminal and ``plain`` elsewhere."""

    auto = "auto"
    live = "live"
    plain = "plain"


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """torch's profiler, which writes RUN_DIR/profiles/step_N/PROCESS.json.gz."""

    steps: Annotated[list[int], Key("e.g. [3]", [])]
    processes: Annotated[
        list[str],
        Key("names as in RUN_DIR/processes.json: policy_worker-0, engine-1, ...", ["policy_worker*"]),
    ]


@dataclass(kw_only=True, slots=True)
class OwnLoggerConfig:
    """A logger of the user's."""

    kind: Annotated[str, Key("package.module:KIND", kinds=LOGGER_KINDS)]
    options: Annotated[dict[str, Any], Key("the kind's own", {})]


def shipped_loggers() -> dict[str, LoggerKind]:
    """Return the shipped loggers by name, in the order of their keys."""
    kinds: dict[str, LoggerKind] = {name: LOGGER_KINDS.load(name) for name in LOGGER_KINDS.names()}
    return dict(sorted(kinds.items(), key=lambda named: named[1].position))


def _with_loggers(config: type) -> type:
    """Give a class a group of keys for each shipped logger, before ``own``."""
    groups = {name: Annotated[kind.options, Key(kind.about)] for name, kind in shipped_loggers().items()}
    written = list(config.__annotations__.items())
    index = [name for name, _ in written].index("own")
    config.__annotations__ = dict([*written[:index], *groups.items(), *written[index:]])
    return config


@dataclass(kw_only=True, slots=True)
@_with_loggers
class LoggerConfig:
    """What a run leaves behind, and what it shows."""

    log_dir: Annotated[str, Key("the run directories are made in it", "runs", is_path=True)]
    run_name: Annotated[str | None, Key("null: config name, date and time", None)]
    console: Annotated[
        ConsoleMode, Key("live on a terminal, plain lines elsewhere; or live, plain", ConsoleMode.auto)
    ]
    num_sample_answers: Annotated[int, Key("how many answers the summary shows", 4, at_least=0)]
    report: Annotated[
        bool,
        Key(
            "write RUN_DIR/report.html while the run goes on: curves, samples, stages "
            "(docs/how_to/report.md)",
            True,
        ),
    ]
    own: Annotated[
        dict[str, OwnLoggerConfig],
        Key(
            "loggers of your own by name, e.g. {mine: {kind: my_logger:KIND}}; docs/how_to/observability.md",
            {},
        ),
    ]
    trace_steps: Annotated[
        list[int],
        Key("e.g. [3]: RUN_DIR/trace_step_3.json shows what every process did when, in ui.perfetto.dev", []),
    ]
    profile: Annotated[ProfileConfig, Key("torch's profiler")]
    nvtx_ranges: Annotated[
        bool, Key("engines and workers mark what they do for NVIDIA Nsight Systems, on GPUs", False)
    ]
