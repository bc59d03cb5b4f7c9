"""Forks of warm servers are processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.functional.warm_servers import ROOT

_TWO_FORKS = """
import os, sys
from pathlib import Path
from tests.functional.warm_servers import FolderOfEachFork

folder = FolderOfEachFork("of-a-module")
for _ in range(2):
    if os.fork() == 0:
        FolderOfEachFork.make_anew(Path(sys.argv[1]))
        assert os.path.dirname(folder.name) == sys.argv[1]
        open(os.path.join(folder.name, "file"), "x").close()
        sys.exit()
    print(os.wait()[1], flush=True)
"""


def test_a_fork_that_ends_takes_no_folder_of_a_module_from_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _TWO_FORKS, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["0", "0"], ended.stderr
