"""Loads datasets with the library ``datasets``: from the hub, files, folders and directories of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

from nemo_like.data.nested_fields import NoField, holder_of
from nemo_like.data.options import DatasetConfig
from nemo_like.data.sources import FILE_READERS
from nemo_like.data.splits import chosen_rows, only_name

_WHOLE = "train"  # load_dataset's name for all rows of a file


def load_huggingface(cfg: DatasetConfig) -> Sequence[Mapping[str, Any]]:
    """Return the rows that a source chooses of a dataset; images of ``images_key`` are the bytes of their
    files.

    ``path`` is a name on the hub, a data file, a directory of data files or one of ``save_to_disk``. Raises
    ValueError for an unknown file ending, split or subset, and else the library's own errors.
    """
    assert cfg.path is not None, "checked before"
    records = _with_own_decimals(_loaded(cfg.path, cfg.split or _WHOLE, cfg.subset), cfg.answer_key)
    return records if cfg.images_key is None else _with_files(records, cfg.images_key)


def _with_files(records: Any, key: str) -> Any:
    """Make a dataset return its images as files: decoding an image while its record is read would hide which
    record has a broken one."""
    import datasets

    kept, feature = datasets.Image(decode=False), records.features.get(key)
    if isinstance(feature, datasets.Image):
        return records.cast_column(key, kept)
    if isinstance(getattr(feature, "feature", None), datasets.Image):
        return records.cast_column(key, datasets.List(kept))
    return records


def _with_own_decimals(records: Any, key: str) -> Any:
    """Make a dataset return short floats by their own decimals: as a Python float, a 32-bit 0.1 would read
    0.10000000149011612."""
    import datasets

    features = deepcopy(records.features)
    try:
        holder, name = holder_of(features, key)
    except NoField:
        return records
    if getattr(holder[name], "dtype", None) not in ("float16", "float32"):
        return records
    for kind in ("string", "float64"):
        cast(dict[str, Any], holder)[name] = datasets.Value(kind)
        records = records.cast(features)
    return records


def _loaded(path: str, split: str, subset: str | None) -> Any:
    import datasets

    target = Path(path)
    is_saved = (target / "dataset_dict.json").is_file() or (target / "state.json").is_file()
    if subset is not None and (target.is_file() or is_saved):
        raise ValueError(
            f"data.*.subset={subset!r}: {path!r} is one dataset and has no subsets; set it to null"
        )
    if target.is_file():
        whole = datasets.load_dataset(_reader_of(target), data_files={_WHOLE: str(target)}, split=_WHOLE)
        return _part({only_name(split, path): whole}, split, path)
    if is_saved:
        saved = datasets.load_from_disk(path)
        is_one = not isinstance(saved, datasets.DatasetDict)
        return _part({only_name(split, path): saved} if is_one else saved, split, path)
    try:
        return datasets.load_dataset(path, subset, split=split)
    except ValueError as error:
        raise ValueError(
            f"{path!r} (data.*.subset={subset}, data.*.split={split}) cannot be loaded: {error}; of a "
            "dataset with several configurations data.*.subset names one"
        ) from error


def _part(parts: Mapping[str, Any], split: str, path: str) -> Any:
    """Return the rows that a split chooses from datasets, which are given by name."""
    import datasets

    sizes = {name: len(part) for name, part in parts.items()}
    chosen = [parts[name].select(rows) for name, rows in chosen_rows(split, sizes, path)]
    return chosen[0] if len(chosen) == 1 else datasets.concatenate_datasets(chosen)


def _reader_of(path: Path) -> str:
    if path.suffix not in FILE_READERS:
        raise ValueError(
            f"data.*.path={str(path)!r} ends in {path.suffix!r}; files must end in {', '.join(FILE_READERS)}"
        )
    return FILE_READERS[path.suffix]
