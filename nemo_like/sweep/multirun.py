"""Makes several runs of one configuration with Hydra's sweepers and launchers: ``run_grpo.py --multirun``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Column, Table

from nemo_like.config.composition import HYDRA_VERSION
from nemo_like.config.loader import Sweep
from nemo_like.config.search_path import folders_behind, searching
from nemo_like.driver.exit_codes import FAILED, FINISHED, INTERRUPTED
from nemo_like.driver.stopping import sigterm_as_interrupt
from nemo_like.observability.disk import DiskFull
from nemo_like.observability.options import shipped_loggers
from nemo_like.observability.printable import warn_on_stderr
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.sweep.job import EndedJob, Job, JobResult, own_arguments, read_results

_DEFAULT_METRIC = "validation/accuracy"
# Writes a page that compares runs, given by their directories with a name for each.
Compare = Callable[[Mapping[Path, str], Path], None]
# Hydra writes no files into a job's directory: the run writes its configuration and its log itself.
_NO_FILES = {"hydra.output_subdir": "null", "hydra/job_logging": "disabled"}


def run_sweep(program: Path, config: Path, sweep: Sweep, compare: Compare) -> int:
    """Run the jobs of a sweep, print a table of them and the path of the page that compares them, and return
    an exit code: FINISHED when every job finished.

    ``program`` is the script that runs one job, with ``--config`` and the job's arguments. ``compare`` writes
    the page.
    """
    settings = {**_NO_FILES, "hydra.sweep.dir": f"'{sweep.directory}'"}
    given = {argument.partition("=")[0].lstrip("+") for argument in sweep.arguments}
    added = [f"{key}={value}" for key, value in settings.items() if key not in given]
    arguments, sys.argv = sys.argv, [str(program), "--multirun", *sweep.arguments, *added]
    exit_code = FINISHED
    try:
        with sigterm_as_interrupt(), searching(folders_behind(config)):
            folder = str(config.parent.absolute())
            hydra.main(folder, config.stem, HYDRA_VERSION)(_task(program, config.absolute()))()
    except KeyboardInterrupt:
        exit_code = INTERRUPTED
    except SystemExit as error:  # Hydra has said why
        exit_code = FAILED if error.code else FINISHED
    finally:
        sys.argv = arguments
    jobs = read_results(Path(sweep.directory))
    results = [job.result for job in jobs]
    print_table(results)
    _compare(jobs, RunDirectory(Path(sweep.directory)).report_path, compare)
    _print_path("sweep_dir", sweep.directory)
    return exit_code or (FAILED if any(result.exit_code for result in results) else FINISHED)


def _compare(jobs: Sequence[EndedJob], page: Path, compare: Compare) -> None:
    """Write the page that compares the jobs which wrote a report of their own, and print its path."""
    labels = [
        f"{job.result.number} {own}".strip()
        for job, own in zip(jobs, own_arguments([job.result for job in jobs]), strict=True)
    ]
    named = {
        job.directory: label
        for job, label in zip(jobs, labels, strict=True)
        if RunDirectory(job.directory).report_path.is_file()
    }
    if not named:
        return
    try:
        compare(named, page)
    except (ValueError, DiskFull, OSError) as error:
        warn_on_stderr(f"the page that compares the jobs cannot be written: {error}")
    else:
        _print_path("report", page)


def _task(program: Path, config: Path) -> Callable[[DictConfig], float | None]:
    """Return the function that Hydra calls for each job, possibly in another process or on another node."""

    def task(cfg: DictConfig) -> float | None:
        hydra_cfg = HydraConfig.get()
        directory = Path(hydra_cfg.runtime.output_dir)
        is_one_at_a_time = hydra_cfg.runtime.choices["hydra/launcher"] == "basic"
        search_path = [each for each in hydra_cfg.overrides.hydra if each.startswith("hydra.searchpath=")]
        job = Job(
            number=hydra_cfg.job.num,
            command=[sys.executable, str(program), "--config", str(config), *search_path],
            arguments=list(hydra_cfg.overrides.task),
            names=_names(cfg.logger, directory),
            directory=directory,
            log=None if is_one_at_a_time else directory.with_name(f"{directory.name}.log"),
            metric=OmegaConf.select(cfg, "checkpointing.metric_name") or _DEFAULT_METRIC,
        )
        result = job.run()
        return result.value if result.exit_code == FINISHED else None

    return task


def _names(logger: DictConfig, directory: Path) -> list[str]:
    """Return arguments that show a sweep's jobs together in loggers, for names that are still null."""
    found: list[str] = []
    for name, kind in shipped_loggers().items():
        if kind.names_in_sweep is not None:
            names = kind.names_in_sweep(directory.parent.name, directory.name).items()
            found += [f"logger.{name}.{key}='{value}'" for key, value in names if logger[name][key] is None]
    return found


def print_table(results: Sequence[JobResult]) -> None:
    """Print a line per job: the arguments that not all jobs have, how it ended, and the compared metric."""
    metric = results[0].metric if results else _DEFAULT_METRIC
    table = Table("job", Column("arguments", overflow="fold"), "ended", "steps", metric, "seconds")
    for result, own in zip(results, own_arguments(results), strict=True):
        value = "-" if result.value is None else f"{result.value:.4f}"
        row = (str(result.number), own, result.outcome, str(result.steps), value, f"{result.seconds:.0f}")
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(f"\n{len(results)} jobs")
    console.print(table)


def _print_path(label: str, path: str | Path) -> None:
    Console().print(f"{label}: {path}", soft_wrap=True)
