"""What a run left in its directory, for a program: metrics and samples as tables, and the trained model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like.observability.jsonl import read_metrics
from nemo_like.observability.run_directory import RunDirectory
from nemo_like_tools.report.sample_files import SampleFile, sample_files, sample_lines

if TYPE_CHECKING:
    import pandas as pd

_OF_A_SAMPLE = (
    *("answer", "reward", "rewards", "advantage", "outcome", "failure", "num_response_tokens"),
    *("source", "index", "group", "generation", "turns"),
)


class RunResult:
    """What the run in ``run_directory`` left. It may be any run, also one that a command started.

    ``outcome`` completes the sentence "the run ..."; None where this program did not make the run.
    """

    def __init__(self, run_directory: str | Path, outcome: str | None = None) -> None:
        self.run_directory = Path(run_directory)
        self.outcome = outcome

    def __repr__(self) -> str:
        return f"RunResult({str(self.run_directory)!r}, outcome={self.outcome!r})"

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row per step and a column per metric (docs/metrics.md); NaN where a step did not measure it.

        Warns of lines that are no metrics. Raises FileNotFoundError when there is no such run.
        """
        import pandas as pd

        records = read_metrics(RunDirectory(self.run_directory).metrics_path)
        return pd.DataFrame(records or {"step": []}).set_index("step").astype("float64")

    @cached_property
    def samples(self) -> pd.DataFrame:
        """A row per sample of the steps and validations of which the run kept the samples.

        ``mode`` is training or validation. ``response`` is all that followed the prompt, of which ``turns``
        has the parts. The reward of a sample is NaN where it failed. Raises FileNotFoundError when the run
        kept no samples, and ValueError, which names file and line, for a line that is no sample.
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
        """The trained model, a directory for transformers and vLLM; None where it was not exported."""
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
