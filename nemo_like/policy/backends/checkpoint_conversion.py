"""Converts a run's checkpoint, which any layout may have written, to a directory that transformers and vLLM
load."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

from nemo_like.algorithms.options import LossConfig
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.policy.backends.backend_kind import backend_kind_of
from nemo_like.policy.backends.interface import WorkerConnections
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.options import Device, PolicyConfig
from nemo_like.policy.workers.worker import PolicyWorker

_TIMEOUT_S = 3600.0


def export_checkpoint(cfg: PolicyConfig, loss: LossConfig, checkpoint: Path, output: Path) -> None:
    """Write ``output`` from ``checkpoint``, a ``step_N/policy`` directory, in this process, on the CPU.

    ``cfg`` and ``loss`` are the run's. This function changes ``cfg`` to a layout of one process, which needs
    host memory for the whole model and its optimizer. Adapters are merged into the weights. Raises
    FileNotFoundError when ``cfg.model_name``, the source of config and tokenizer, is not a directory.
    """
    if not Path(cfg.model_name).is_dir():
        raise FileNotFoundError(f"policy.model_name={cfg.model_name} is not a directory")
    _become_one_process(cfg)
    with TemporaryDirectory() as folder:
        worker = PolicyWorker(
            cfg=cfg,
            loss=loss,
            connections=WorkerConnections(
                parallel_layout(cfg).coordinates(0), InMemoryDataPlane(), Path(folder, "store"), _TIMEOUT_S
            ),
            temperature=1.0,
            weight_sender=None,
        )
        worker.setup()
        try:
            worker.load_checkpoint(str(checkpoint), version=0)
            worker.export_hf(str(output))
        finally:
            worker.stop()


def _become_one_process(cfg: PolicyConfig) -> None:
    cfg.device = Device.cpu
    cfg.data_parallel_size = 1
    kind = backend_kind_of(cfg)
    for key in kind.axes.values():
        _set(cfg, key, 1)
    if kind.sequence_parallel:
        _set(cfg, kind.sequence_parallel, False)


def _set(cfg: PolicyConfig, key: str, value: object) -> None:
    part, _, leaf = key.rpartition(".")
    setattr(attrgetter(part)(cfg), leaf, value)
