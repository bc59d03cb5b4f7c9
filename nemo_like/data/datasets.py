"""From a config section to a dataset."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_like.config.schema import DatasetConfig, DatasetKind
from nemo_like.data.arithmetic import ArithmeticDataset
from nemo_like.data.interface import PromptDataset, PromptExample, Split
from nemo_like.data.records import RecordDataset, load_huggingface, read_jsonl


@dataclass(frozen=True, slots=True)
class TaskDataset:
    """A dataset whose problems name the environment that judges them."""

    problems: PromptDataset
    env: str

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> PromptExample:
        return replace(self.problems[index], env=self.env)


def build_dataset(cfg: DatasetConfig, split: Split) -> PromptDataset:
    """The dataset of one section (``data.train`` or ``data.validation``).

    ``split`` chooses the held-out part where the dataset makes its own (arithmetic); a file or a
    hub dataset is used as its section names it. Raises ValueError when a needed key is null or the
    data do not fit.
    """
    return TaskDataset(_problems(cfg, split), cfg.env)


def _problems(cfg: DatasetConfig, split: Split) -> PromptDataset:
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
