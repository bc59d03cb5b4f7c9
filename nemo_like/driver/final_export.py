"""Exports the policy as a Hugging Face checkpoint: into every checkpoint of a run, and into its directory at
its end, complete or not at all.

An export names its step. When a finished run's command is given again, it can tell that the last export is
missing, because the run was ended before it, or out of date, because the run was trained further.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from nemo_like.data.chat_template import set_chat_template
from nemo_like.observability.disk import whole_directory
from nemo_like.observability.run_directory import RunDirectory

_STEP_FILE = "run.json"


class PolicyExport:
    """Writes the policy of a step with the run's chat template."""

    def __init__(self, chat_template: Path | None = None) -> None:
        """Read ``chat_template`` now, since the file may change before the run ends; None: the tokenizer
        keeps its own."""
        self._chat_template = None if chat_template is None else chat_template.read_text(encoding="utf-8")

    def write(self, path: Path, export: Callable[[str], None], step: int) -> None:
        """Have ``export`` write the policy of ``step`` into the directory ``path``; raise its errors."""
        export(str(path))
        if self._chat_template is not None:
            set_chat_template(path, self._chat_template)
        (path / _STEP_FILE).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")


class FinalExport:
    """The export in RUN_DIR/final_hf."""

    def __init__(self, directory: RunDirectory, num_bytes: int, policy: PolicyExport) -> None:
        """Export into ``directory`` by ``policy``; ``num_bytes`` is the size of the weights."""
        self.path = directory.final_hf_path
        self._num_bytes, self._policy = num_bytes, policy

    @property
    def step(self) -> int | None:
        """The step after which the policy was exported; None without an export, or if it names no step."""
        try:
            return int(json.loads((self.path / _STEP_FILE).read_text(encoding="utf-8"))["step"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, export: Callable[[str], None], step: int) -> None:
        """Have ``export(path)`` write the policy of ``step`` into a temporary directory, then move it into
        place.

        An earlier export stays until the new one is complete. Raises DiskFull, OSError when the export cannot
        be written, and the errors of ``export``.
        """
        with whole_directory(self.path, "the trained model", self._num_bytes) as aside:
            self._policy.write(aside, export, step)
