"""Reads what a run left in its directory, for a program: metrics and samples as tables, and the model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like.observability.jsonl import read_metrics
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.rollout.options import EXCERPT_OF
from nemo_like_tools.report.sample_files import SampleFile, sample_files, sample_lines

if TYPE_CHECKING:
    import pandas as pd

_OF_A_SAMPLE = (
    *("answer", "reward", "rewards", "advantage", "outcome", "failure", "num_response_tokens"),
    *("source", "index", "group", "generation", "turns", EXCERPT_OF),
)


class RunResult:
    """What a run left in ``run_directory``; the run may also have been started by a command.

    ``outcome`` completes the sentence "the run ..."; it is None when this program did not make the run.
    """

    def __init__(self, run_directory: str | Path, outcome: str | None = None) -> None:
        self.run_directory = Path(run_directory)
        self.outcome = outcome

    def __repr__(self) -> str:
        return f"RunResult({str(self.run_directory)!r}, outcome={self.outcome!r})"

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Return the metrics (docs/reference/metrics.md): a row per step, a column per metric, NaN where a
        step has no value.

        Warns of lines that are no metrics. Raises FileNotFoundError when there is no such run.
        """
        import pandas as pd

        records = read_metrics(RunDirectory(self.run_directory).metrics_path)
        return pd.DataFrame(records or {"step": []}).set_index("step").astype("float64")

    @cached_property
    def samples(self) -> pd.DataFrame:
        """Return the samples that the run kept, a row per sample.

        ``excerpt_of`` is the number of samples that the step had, where only some were kept. ``mode`` is
        training or validation. ``response`` is everything after the prompt, and ``turns`` has its
        parts. The reward is NaN where the sample failed. Raises FileNotFoundError when the run kept no
        samples, and ValueError, which names file and line, for a line that is no sample.
        """
        import pandas as pd

        files = sample_files(self.run_directory)
        if not files:
            raise FileNotFoundError(
                f"{self.run_directory} has no samples; rollout.dump_period=1 keeps those of every step, "
                "rollout.dump_validation=true those of every validation"
            )
        return pd.DataFrame(_row(file, line.value) for file in files for line in sample_lines(file.path))

    @property
    def model_path(self) -> Path | None:
        """The directory of the trained model, for transformers and vLLM; None when it was not exported."""
        path = RunDirectory(self.run_directory).final_hf_path
        return path if path.is_dir() else None


def _row(file: SampleFile, sample: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "mode": file.mode,
        "step": file.step,
        "prompt": sample["prompt"],
        "response": "".join(turn["content"] for turn in sample["turns"]),
        **{name: sample.get(name) for name in _OF_A_SAMPLE},
    }
