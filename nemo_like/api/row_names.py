"""Names rows in messages by the program's arguments, such as ``train[3]``, and not by lines of files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_like.config.problems import ConfigError
from nemo_like.data.options import DataConfig


@dataclass(frozen=True, slots=True)
class RowNames:
    """The arguments whose rows were written, by the paths of their files, which have one row per line."""

    arguments: Mapping[str, str]

    @classmethod
    def of(cls, data: DataConfig, folder: Path) -> RowNames:
        """Return the names for the files of a configuration that are in ``folder``; others keep their own."""
        sources = {"train": data.train[0].path, "validation": data.validation[0].path}
        # Without rows for validation both are one file, which is named after the first.
        written = {path: name for name, path in reversed(sources.items()) if path is not None}
        return cls({path: name for path, name in written.items() if Path(path).parent == folder})

    def in_text(self, text: str) -> str:
        """Return a text with names in place of the files, their lines and the keys that name them."""
        for path, name in self.arguments.items():
            file = re.escape(path)
            for line in {*re.findall(rf"{file}:(\d+)", text)}:
                text = re.sub(rf"{file}:{line}\b", f"{name}[{int(line) - 1}]", text)
            text = re.sub(rf"data\.(?:train|validation)\.path={file}|{file}", name, text)
        return text

    @contextmanager
    def in_problems(self) -> Iterator[None]:
        """Let a ConfigError that the ``with`` block raises name rows so, and have each problem once."""
        try:
            yield
        except ConfigError as error:
            named = [
                replace(
                    one,
                    key=self.in_text(one.key),
                    rule=self.in_text(one.rule),
                    remedy=self.in_text(one.remedy),
                    where=self.in_text(one.where),
                )
                for one in error.problems
            ]
            raise ConfigError([*dict.fromkeys(named)]) from None
