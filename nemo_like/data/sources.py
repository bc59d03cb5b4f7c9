"""The files of data sources, and the columns that their records may bring."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nemo_like.data.options import DataConfig, DatasetConfig

# By a file's ending, load_dataset's name for its reader.
FILE_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


# A value of data.*.columns: "float32", "uint8[4, 2]", "per_token float32", "ragged" or "objects".
RECORD_COLUMN = re.compile(
    r"(?:(?P<per_token>per_token )?(?P<dtype>bool|u?int(?:8|16|32|64)|float(?:16|32|64))"
    r"(?:\[(?P<shape>\d+(?:, ?\d+)*)\])?|(?P<layout>ragged|objects))"
)


def data_sources(data: DataConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Yield every source with its full key: ``data.train``, or ``data.train[1]`` in a list of several."""
    for section, sources in (("train", data.train), ("validation", data.validation)):
        for index, source in enumerate(sources):
            yield f"data.{section}" + (f"[{index}]" if len(sources) > 1 else ""), source
