"""The trained policy as a Hugging Face checkpoint in the run directory: whole, or not there.

Its step stands beside the weights, so that the same command knows whether a run that made its last step
was ended before it had exported, or exported an earlier end that was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from nemo_like.data.chat_template import set_chat_template
from nemo_like.observability.disk import whole_directory
from nemo_like.observability.run_directory import RunDirectory

_STEP_FILE = "run.json"


class FinalExport:
    """RUN_DIR/final_hf."""

    def __init__(self, directory: RunDirectory, num_bytes: int, chat_template: Path | None = None) -> None:
        """``num_bytes`` is the size of the weights. ``chat_template`` is a file to read now, since it may be
        another by the end of the run; null: the tokenizer keeps its own."""
        self.path = directory.final_hf_path
        self._num_bytes = num_bytes
        self._chat_template = None if chat_template is None else chat_template.read_text(encoding="utf-8")

    @property
    def step(self) -> int | None:
        """The last rollout step of what was exported; None where nothing was, or it is not known of which."""
        try:
            return int(json.loads((self.path / _STEP_FILE).read_text(encoding="utf-8"))["step"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, export: Callable[[str], None], step: int) -> None:
        """Have ``export`` write aside, and let that take the place of an earlier export once it is whole.

        Raises DiskFull, OSError when it cannot be written, and what ``export`` raises.
        """
        with whole_directory(self.path, "the trained model", self._num_bytes) as aside:
            export(str(aside))
            if self._chat_template is not None:
                set_chat_template(aside, self._chat_template)
            (aside / _STEP_FILE).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
