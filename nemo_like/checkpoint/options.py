"""The keys of checkpoints, ``checkpointing``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from nemo_like.config.keys import Key


class CheckpointWriting(Enum):
    """When a checkpoint is written to disk."""

    background = "background"  # from a copy in host memory, while the next step runs
    blocking = "blocking"  # before the next step begins


class ResumeParts(Enum):
    """What a run takes of another run's checkpoint."""

    all = "all"  # it goes on as the other run would
    weights = "weights"  # it begins at step 0
    weights_and_optimizer = "weights_and_optimizer"  # it begins at step 0, with Adam's moments of before

    @property
    def about(self) -> str:
        """What is taken and what is new, to be read after "takes"."""
        moments = "" if self is ResumeParts.weights else " and Adam's moments"
        if self is ResumeParts.all:
            return "everything, and goes on with its step and prompt order"
        return f"the weights{moments} alone, and begins at step 0 with its own schedule and prompt order"


@dataclass(kw_only=True, slots=True)
class CheckpointingConfig:
    """What a run saves: checkpoints from which it can be resumed (docs/how_to/checkpoints.md), and the
    trained model."""

    enabled: Annotated[bool, Key("save policy, optimizer, prompt order and counters", True)]
    resume_if_exists: Annotated[
        bool, Key("a run of the same logger.run_name continues from its latest checkpoint", True)
    ]
    resume_from_path: Annotated[
        str | None,
        Key(
            "A checkpoint of another run, RUN_DIR/checkpoints/step_N: a run without one of its own goes on "
            "from it, with its weights, optimizer, prompt order and step, or begins with what "
            "resume_parts names.",
            None,
            is_path=True,
        ),
    ]
    resume_parts: Annotated[
        ResumeParts,
        Key(
            "Of resume_from_path: all; or weights, or weights_and_optimizer, with which a run begins at step "
            "0, with its own schedule, prompt order and data.",
            ResumeParts.all,
        ),
    ]
    checkpoint_dir: Annotated[str | None, Key("null: RUN_DIR/checkpoints", None, is_path=True)]
    save_period: Annotated[
        int,
        Key("save every so many steps; 0: only after the last step and when asked to stop", 20, at_least=0),
    ]
    writing: Annotated[
        CheckpointWriting,
        Key(
            "from a copy in host memory, while the next step runs; or blocking: before the next step",
            CheckpointWriting.background,
        ),
    ]
    keep_top_k: Annotated[
        int | None, Key("how many of the best to keep besides the latest; null keeps all", 1, at_least=1)
    ]
    metric_name: Annotated[
        str | None,
        Key('"best" is judged by this metric; null: the latest are the best', "validation/accuracy"),
    ]
    higher_is_better: Annotated[bool, Key("of metric_name", True)]
    checkpoint_must_save_by: Annotated[
        str | None, Key("DD:HH:MM:SS after the start: save and stop before it, with exit code 75", None)
    ]
    export_hf: Annotated[
        bool,
        Key("write hf/ into every checkpoint, for transformers and vLLM; the next step waits for it", False),
    ]
    export_final_hf: Annotated[
        bool, Key("write final_hf/ into the run directory, for transformers and vLLM", True)
    ]
