"""A notebook's kernel, and what one sees of it from outside."""

from __future__ import annotations

import os
import queue
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.functional.leftovers import processes
from tests.functional.runs import MARK, ROOT, temporary_directory
from tests.functional.warm_servers import sharing


@dataclass
class Kernel:
    """A running kernel. What its cells print is in ``printed``."""

    manager: KernelManager
    client: BlockingKernelClient
    mark: str
    printed: str = ""

    def start(self, cell: str) -> str:
        """Begin to run a cell; return the id by which its end is known."""
        self.printed = ""
        return self.client.execute(cell)

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        """Return once the cell under way has printed the text."""
        deadline = time.monotonic() + timeout_s
        while text not in self.printed:
            if time.monotonic() > deadline:
                pytest.fail(f"no {text!r} within {timeout_s:g} s, but:\n{self.printed}")
            self._read(1.0)

    def end_of(self, cell_id: str, timeout_s: float = 120.0) -> str:
        """Wait until a cell has ended; return the name of the exception it ended with, or an empty text."""
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self.client.get_shell_msg(timeout=deadline - time.monotonic())
            if reply["parent_header"]["msg_id"] == cell_id:
                break
        while self._read(0.5):
            pass
        return reply["content"].get("ename", "")

    def run(self, cell: str) -> str:
        """Run a cell and return what it printed; it must not raise."""
        raised = self.end_of(self.start(cell), timeout_s=300.0)
        assert not raised, self.printed
        return self.printed

    def others(self) -> list[str]:
        """Command lines of the processes that descend from the kernel."""
        pid = self.manager.provisioner.pid
        return [" ".join(one.cmdline())[:100] for one in processes(self.mark) if one.pid != pid]

    def _read(self, timeout_s: float) -> bool:
        try:
            message = self.client.get_iopub_msg(timeout=timeout_s)
        except queue.Empty:
            return False
        content = message["content"]
        self.printed += content.get("text", "") + "\n".join(content.get("traceback", []))
        return True


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """A kernel that works in ``folder`` and keeps its own files there."""
    mark = uuid.uuid4().hex
    with kernel_environment(mark, folder) as environment:
        manager = KernelManager(kernel_name="python3", connection_file=str(folder / "kernel.json"))
        manager.start_kernel(cwd=str(folder), env=environment)
        client = manager.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            yield Kernel(manager, client, mark)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


@contextmanager
def kernel_environment(mark: str, folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a kernel, with a directory for temporary files of its own."""
    temporary = temporary_directory(mark)
    temporary.mkdir()
    try:
        yield {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **sharing(),
            MARK: mark,
            "TMPDIR": str(temporary),
            "IPYTHONDIR": str(folder / "ipython"),
        }
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
