"""From a config section to a dataset."""

from __future__ import annotations

from nemo_like.config.schema import DatasetConfig, DatasetKind
from nemo_like.data.arithmetic import ArithmeticDataset
from nemo_like.data.interface import PromptDataset, Split
from nemo_like.data.records import RecordDataset, load_huggingface, read_jsonl


def build_dataset(cfg: DatasetConfig, split: Split) -> PromptDataset:
    """The dataset of one section (``data.train`` or ``data.validation``).

    ``split`` chooses the held-out part where the dataset makes its own (arithmetic); a file or a
    hub dataset is used as its section names it. Raises ValueError when a needed key is null or the
    data do not fit.
    """
    if cfg.kind is DatasetKind.arithmetic:
        return ArithmeticDataset(cfg.digits, split)
    if cfg.path is None:
        raise ValueError(f"data.{split}.path is null; kind={cfg.kind.value} needs a path")
    if cfg.kind is DatasetKind.jsonl:
        return RecordDataset(read_jsonl(cfg.path), cfg.prompt_key, cfg.answer_key, cfg.path)
    if cfg.split is None:
        raise ValueError(f"data.{split}.split is null; kind={cfg.kind.value} needs one, for example train")
    records = load_huggingface(cfg.path, cfg.split)
    return RecordDataset(records, cfg.prompt_key, cfg.answer_key, f"{cfg.path} [{cfg.split}]")
