"""``GRPO``: a run of this process, with a reward function and rows that are objects of the program.

GRPO(...)   arguments ──▶ configuration; checks of the arguments
train()     checks of everything else ──▶ rows and reward in RUN_DIR/inputs
            ──▶ driver.whole_run.run_in, which starts Ray and ends it again ──▶ RunResult
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_like.api.argument_names import answers_other_names
from nemo_like.api.base_configuration import InputFiles, ProgramArguments, local_model
from nemo_like.api.first_reward import check_first_reward
from nemo_like.api.given_overrides import Overrides, override_texts
from nemo_like.api.row_names import RowNames
from nemo_like.api.run_inputs import (
    GivenReward,
    Rows,
    check_reward,
    checked_rows,
    named_reward,
    write_reward,
    write_rows,
)
from nemo_like.api.run_result import RunResult
from nemo_like.cluster.proxies import bypass_proxies
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.driver import exit_codes
from nemo_like.driver.run_failures import CallbackFailed, RunFailed
from nemo_like.driver.stopping import OnStep, sigterm_as_interrupt
from nemo_like.plan.machine_rules import Machine
from nemo_like.preflight.checks import preflight
from nemo_like.preflight.epochs import with_counted_epochs
from nemo_like.rollout.tasks import max_prompt_tokens
from nemo_like.rules.rules import validate

if TYPE_CHECKING:
    from nemo_like.driver.whole_run import RunEnd

# Variables that Ray sets, also for breakpoint(), and variables that name hosts to reach without a proxy.
_CHANGED = ("RAY_", "PYTHONBREAKPOINT", "NO_PROXY", "no_proxy")


class GRPO:
    """A GRPO run of a model on rows, with a reward function; docs/how_to/notebook.md has examples.

    ``model`` is a checkpoint's directory or its name on the Hugging Face hub. ``reward`` may have the
    parameters ``prompt``, ``response``, ``answer``, ``turn`` and fields of the row, and is called with the
    ones that it has; it returns a number, named numbers or a ``Feedback``, and may be async. It may also be a
    list of such functions; the reward is the sum of theirs, each times its number in ``reward_weights`` (1
    where there are none). ``train`` and ``validation`` are lists of dicts with the field ``prompt``, or paths
    of files of such records; without ``validation`` the run does not validate.

    ``on_step(step, metrics)`` is called after each of the ``num_steps`` steps; when it returns False, the run
    saves and ends. ``config`` is a configuration to build on, instead of the one that suits this machine.
    ``overrides`` has keys and values, such as {"policy.optimizer.lr": 1e-5}, also nested, or is a list of
    arguments as ``run_grpo.py`` takes them, such as "policy.optimizer.lr=1e-5".
    """

    @answers_other_names
    def __init__(
        self,
        model: str | Path,
        *,
        reward: GivenReward,
        train: Rows,
        num_steps: int,
        reward_weights: Sequence[float] | None = None,
        validation: Rows | None = None,
        on_step: OnStep | None = None,
        config: str | Path | None = None,
        overrides: Overrides = (),
    ) -> None:
        """Check the arguments. Raises ConfigError, which is a ValueError, when no run can start with them."""
        if on_step is not None and not callable(on_step):
            raise ConfigError.of(
                "on_step", f"is {type(on_step).__name__} and cannot be called", "give a function"
            )
        if not isinstance(num_steps, int) or num_steps < 1:
            raise ConfigError.of(f"num_steps={num_steps}", "must be a whole number of at least 1")
        self._model, self._on_step = model, on_step
        self._reward = named_reward(reward, reward_weights)
        self._arguments = ProgramArguments(num_steps, config, override_texts(overrides))
        source = self._without_inputs(str(model)).data.train[0]
        self._train = checked_rows("train", train, source)
        self._validation = None if validation is None else checked_rows("validation", validation, source)
        check_reward(self._reward, "train", self._train, source)
        check_reward(self._reward, "validation", self._validation or [], source)

    def train(self) -> RunResult:
        """Make the run and return what it left. Each call makes another run.

        A run with a logger.run_name continues where an earlier run of that name stopped. Only the main thread
        may call this, and Ray may not be in use in this process. After a first Ctrl-C or SIGTERM the run ends
        its step, saves, and returns its result too. Raises ConfigError before anything starts, RunFailed when
        the run fails, DirectoryInUse when another run uses its directory, KeyboardInterrupt when it is
        interrupted before the first step or a second time, and the error of ``on_step`` when that raises one.
        """
        _check_process()
        model = local_model(self._model)
        with sigterm_as_interrupt(), _variables_restored():
            bypass_proxies()
            counted = self._check(model)
            # Only now: this loads Ray, and the checks above must be quick.
            from nemo_like.driver.whole_run import run_directory, run_in
            from nemo_like_tools.report.report_recorder import ReportRecorder

            directory = run_directory(self._without_inputs(model), "grpo")
            cfg = self._with_inputs(model, directory.path / "inputs", counted)
            end = run_in(directory, cfg, self._on_step, ReportRecorder)
        return _result(end, directory.path)

    def _check(self, model: str) -> tuple[str, ...]:
        """Raise ConfigError for every problem that can be found before the run has a directory. Return an
        argument with the steps of the run's epochs, where it counts them."""
        with tempfile.TemporaryDirectory() as folder:
            cfg = self._with_inputs(model, Path(folder))
            rows, say = RowNames.of(cfg.data, Path(folder)), partial(print, flush=True)
            with rows.in_problems():
                cfg, of_epochs = with_counted_epochs(
                    lambda more: self._with_inputs(model, Path(folder), more), Machine.this
                )
                for note in of_epochs:
                    say(note.text)
                validate(cfg)
                notes = preflight(cfg, Machine.this, say).notes
                if too_long := dict.fromkeys(place for note in notes for place in note.too_long):
                    limit = f"prompts of more than {max_prompt_tokens(cfg)} tokens are left out"
                    say(rows.in_text(f"warning: {limit}, such as {', '.join(too_long)}"))
                check_first_reward(cfg)
        return (f"grpo.max_num_steps={cfg.grpo.max_num_steps}",) if of_epochs else ()

    def _without_inputs(self, model: str) -> Config:
        """Return the configuration with the reward and the rows in files that do not exist."""
        nowhere = Path("inputs")
        return self._arguments.configuration(model, InputFiles(nowhere, nowhere, nowhere))

    def _with_inputs(self, model: str, folder: Path, more: Sequence[str] = ()) -> Config:
        """Write reward and rows into ``folder``, and return the configuration that names the files, with the
        arguments ``more``."""
        return self._arguments.configuration(
            model,
            InputFiles(
                reward=write_reward(folder, self._reward),
                train=write_rows(folder, "train", self._train),
                validation=None
                if self._validation is None
                else write_rows(folder, "validation", self._validation),
            ),
        )


@contextmanager
def _variables_restored() -> Iterator[None]:
    """Undo, after the ``with`` block, what Ray and the run changed in the environment variables."""

    def present() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith(_CHANGED)}

    before = present()
    try:
        yield
    finally:
        for name in present().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _check_process() -> None:
    """Raise RuntimeError unless this is the main thread and Ray is not in use in this process."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "GRPO.train() was called in another thread than the main one, in which alone a run can be "
            "interrupted and stopped; call it in the main thread, or start a process for it"
        )
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized():
            raise RuntimeError(
                "this process uses Ray already, and GRPO.train() starts one of its own; call ray.shutdown() "
                "first. overrides=['cluster.address=auto'] trains on a Ray that other processes use"
            )


def _result(end: RunEnd, directory: Path) -> RunResult:
    """Return what a run left. Raises the run's error unless it finished or was asked to stop."""
    if end.exit_code in (exit_codes.FINISHED, exit_codes.PREEMPTED):
        return RunResult(directory, end.outcome)
    if end.exit_code == exit_codes.INTERRUPTED:
        raise KeyboardInterrupt
    if isinstance(end.error, CallbackFailed) and end.error.__cause__ is not None:
        raise end.error.__cause__
    raise RunFailed(f"the run {end.outcome} (its directory is {directory})") from end.error
