"""Runs from Python: the notebook of docs/, and what a kernel goes through with them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from nemo_like import RunResult
from tests.functional.kernels import Kernel, kernel, kernel_environment
from tests.functional.leftovers import abandoned_names, shared_names, soon
from tests.functional.runs import ROOT, processes_of, temporary_files

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_run]

NOTEBOOK = nbformat.read(ROOT / "docs" / "how_to" / "notebook.ipynb", as_version=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the repository's folders, so that the notebook's runs are not among other people's."""
    (tmp_path / "docs" / "how_to").mkdir(parents=True)
    for name in ("scripts", ".cache"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


# The notebook with runs that are short: what is changed, and into what.
FEW_STEPS = {
    "grpo.num_prompts_per_step=128": "grpo.num_prompts_per_step=16",
    "rows[9000:9256]": "rows[9000:9016]",
    '"generation.max_new_tokens=4",': '"generation.max_new_tokens=4", "data_plane.backend=in_memory",',
    "num_steps=30": "num_steps=2",
    "num_steps=3,": "num_steps=1,",
}


def changed(cells: Sequence[str], changes: Mapping[str, str]) -> list[str]:
    """Return the cells with other texts in them; each text is in one of the cells, once."""
    for text, other in changes.items():
        assert sum(cell.count(text) for cell in cells) == 1, text
        cells = [cell.replace(text, other) for cell in cells]
    return [*cells]


def test_every_cell_of_the_notebook_runs_also_after_an_interrupt(arithmetic_model: str, folder: Path) -> None:
    cells = [cell.source for cell in NOTEBOOK.cells if cell.cell_type == "code"]
    is_run = next(index for index, cell in enumerate(cells) if "result = run.train()" in cell)
    few = changed(cells, FEW_STEPS)
    with kernel(folder / "docs" / "how_to") as one:
        for cell in few[:is_run]:
            one.run(cell)
        one.run(HANDLERS)
        # What is interrupted goes on for long, and has the processes of TransferQueue.
        long = few[is_run].replace("num_steps=2", "num_steps=200").replace("in_memory", "simple")
        interrupt(one, long, "step 1/", "", "The run was stopped: received SIGINT (Ctrl-C). Step ")
        for cell in few[is_run:]:
            one.run(cell)
        # The kernel alone is left while it lives, and none of the runs' files.
        assert one.others() == []
        assert [name for name in temporary_files(one.mark) if name.startswith(("job-", "ray"))] == []
    interrupted, first, further = map(RunResult, sorted((folder / "runs").iterdir()))
    assert [*interrupted.metrics["train/loss"].dropna().index][:1] == [1]
    assert [*first.metrics["train/loss"].dropna().index] == [1, 2]
    assert [*first.metrics["validation/accuracy"].dropna().index] == [0, 2]
    assert [*further.metrics["train/env/reward/reward/right_digits"].index] == [1]
    given = (further.run_directory / "config.yaml").read_text()
    assert f"model_name: {first.model_path}\n" in given  # it begins where the first one ended


@pytest.mark.slow
def test_the_notebook_learns(arithmetic_model: str, folder: Path) -> None:
    notebook = deepcopy(NOTEBOOK)
    place = {"metadata": {"path": str(folder / "docs" / "how_to")}}
    mark = uuid.uuid4().hex
    with kernel_environment(mark, folder) as environment:
        client = NotebookClient(notebook, timeout=300, resources=place)
        with client.setup_kernel(env=environment):
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            assert len(processes_of(mark)) == 1
    first, further = sorted((folder / "runs").iterdir())
    accuracy = RunResult(first).metrics["validation/accuracy"].dropna()
    assert accuracy[30] > accuracy[0] + 0.3
    rewards = RunResult(further).metrics["train/reward"]
    assert rewards[1] > 0.7  # it begins where the first one ended
    shown = [text for cell in notebook.cells for text in _texts(cell)]
    assert "'21+43=640'" in shown


def _texts(cell: nbformat.NotebookNode) -> Iterator[str]:
    """The values that a cell shows."""
    for output in cell.get("outputs", ()):
        yield output.get("data", {}).get("text/plain", "")


SETTINGS = """
import os
from nemo_like import GRPO

PROMPTS = [{{"prompt": f"{{n:02}}+11=", "answer": "000"}} for n in range(64)]
SMALL = [
    "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "generation.max_new_tokens=4",
    "policy.max_total_sequence_length=32", "rollout.dump_period=1", "logger.log_dir='{runs}'",
]


def reward(response):
    return float(len(response))


def run(num_steps, **more):
    more = {{"overrides": SMALL, **more}}
    return GRPO("{model}", reward=reward, train=PROMPTS, num_steps=num_steps, **more)

environment = dict(os.environ)
"""


@pytest.fixture(scope="module")
def prepared(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel whose first cell has defined what the runs of these tests share."""
    folder = tmp_path_factory.mktemp("kernel")
    with kernel(folder) as one:
        one.run(SETTINGS.format(model=ROOT / arithmetic_model, runs=folder / "runs"))
        yield one


@pytest.mark.slow
def test_an_interrupt_while_a_run_starts_ends_it_and_the_kernel_lives_on(prepared: Kernel) -> None:
    prepared.run(HANDLERS)
    told = "The run was interrupted. No step was saved yet."
    interrupt(prepared, "run(100000).train()", "starting the data plane", "KeyboardInterrupt", told)


HANDLERS = """
import signal
from pathlib import Path

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
handlers = [signal.getsignal(one) for one in HANDLED]
folder = Path.cwd()
"""


def interrupt(one: Kernel, cell: str, moment: str, raised: str, told: str) -> None:
    """Interrupt a cell with a run at this moment; check what it raises and has said at its end, that nothing
    of the run is left, and that it changed nothing of the kernel, which has run ``HANDLERS``."""
    before = shared_names()
    under_way = one.start(cell)
    one.wait_for(moment)
    one.manager.interrupt_kernel()
    assert one.end_of(under_way) == raised, one.printed
    assert one.others() == []
    assert soon(lambda: not abandoned_names(before)), abandoned_names(before)
    assert told in one.printed
    kept = one.run("print([signal.getsignal(one) for one in HANDLED] == handlers, Path.cwd() == folder)")
    assert kept.startswith("True True")


STOPPING = """
rewards = []

def stop_at_two(step, metrics):
    rewards.append(metrics["train/reward"])
    return step < 2

def fail(step, metrics):
    raise LookupError("of the callback")

settings = [*SMALL, "logger.run_name=stopped"]
result = run(1000, on_step=stop_at_two, overrides=settings).train()
print("outcome:", result.outcome)
print("seen:", rewards == [*result.metrics["train/reward"]], len(result.samples), result.model_path.is_dir())
print("saved:", sorted(path.name for path in (result.run_directory / "checkpoints").iterdir()))
try:
    run(1000, on_step=fail, overrides=settings).train()
except LookupError as error:
    print("raised:", error, [*type(result)(result.run_directory).metrics.index])
changed = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
print("changed:", changed)
"""


@pytest.mark.slow
def test_a_callback_ends_a_run_which_then_continues_and_what_a_callback_raises_is_raised(
    prepared: Kernel,
) -> None:
    told = prepared.run(STOPPING)
    assert "outcome: was stopped: on_step returned False after step 2" in told
    assert "seen: True 64 True" in told
    assert "'step_2'" in re.search(r"saved: (.*)", told)[1]
    assert "continuing after step 2" in told
    assert "The run failed: on_step raised LookupError after step 3: of the callback" in told
    assert "raised: of the callback [1, 2, 3]" in told
    assert "changed: set()" in told
    assert prepared.others() == []
