"""What scripts that make a tiny model share: a bar of progress, and a directory that is whole or absent."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from nemo_like.observability.disk import give_usual_mode

from .warm_start import WarmStartProgress


@contextmanager
def shown(target_accuracy: float) -> Iterator[Callable[[WarmStartProgress], None]]:
    """Show a bar, which the function that the block gets moves towards the target."""
    columns = (
        TextColumn("held-out accuracy {task.completed:.2f}"),
        BarColumn(),
        TextColumn("step {task.fields[step]}, loss {task.fields[loss]:.2f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("warm start", total=target_accuracy, step=0, loss=float("nan"))
        yield lambda progress: bar.update(
            task, completed=progress.accuracy, step=progress.step, loss=progress.loss
        )


@contextmanager
def whole_directory(output: Path) -> Iterator[Path]:
    """Give the block a directory beside ``output``, which takes its name unless the block raises, or another
    process has made ``output`` meanwhile: that one stays."""
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield aside
        for path in (aside, *aside.iterdir()):
            give_usual_mode(path)
        try:
            aside.rename(output)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
