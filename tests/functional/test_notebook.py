"""Runs from Python: the notebook of docs/, and what a kernel goes through with them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from nemo_like import RunResult
from tests.functional.kernels import Kernel, kernel, kernel_environment
from tests.functional.leftovers import abandoned_names, shared_names, soon
from tests.functional.runs import ROOT, processes_of, temporary_files

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_run]


def test_the_notebook_learns(arithmetic_model: str, tmp_path: Path) -> None:
    """In a copy of the repository's folders, so that its runs are not among other people's."""
    (tmp_path / "docs").mkdir()
    for folder in ("scripts", ".cache"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    place = {"metadata": {"path": str(tmp_path / "docs")}}
    mark = uuid.uuid4().hex
    with kernel_environment(mark, tmp_path) as environment:
        client = NotebookClient(notebook, timeout=300, resources=place)
        with client.setup_kernel(env=environment):
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            # The kernel alone is left while it lives, and none of the runs' files.
            assert len(processes_of(mark)) == 1
            assert [name for name in temporary_files(mark) if name.startswith(("job-", "ray"))] == []
    first, further = sorted((tmp_path / "runs").iterdir())
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
import signal, os
from pathlib import Path
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


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
handlers = [signal.getsignal(one) for one in HANDLED]
environment = dict(os.environ)
"""


@pytest.fixture(scope="module")
def prepared(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel whose first cell has defined what the runs of these tests share."""
    folder = tmp_path_factory.mktemp("kernel")
    with kernel(folder) as one:
        one.run(SETTINGS.format(model=ROOT / arithmetic_model, runs=folder / "runs"))
        yield one


@pytest.mark.parametrize(
    "moment", [pytest.param("starting the data plane", marks=pytest.mark.slow), "step 1/"]
)
def test_an_interrupt_ends_the_run_and_the_kernel_lives_on(prepared: Kernel, moment: str) -> None:
    before = shared_names()
    cell = prepared.start("run(100000).train()")
    prepared.wait_for(moment)
    prepared.manager.interrupt_kernel()
    assert prepared.end_of(cell) == "KeyboardInterrupt"
    assert prepared.others() == []
    assert soon(lambda: not abandoned_names(before)), abandoned_names(before)
    assert "The run was interrupted." in prepared.printed
    told = prepared.run("print([signal.getsignal(one) for one in HANDLED] == handlers, Path.cwd().name)")
    assert told.startswith("True kernel")


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
