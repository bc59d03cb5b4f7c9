"""Python imports this module at the start of every process that has this folder on PYTHONPATH. In the process
of a run's fork server and in that of a check it hands over to a fork of a warm one
(``tests.functional.warm_servers``)."""

import sys

is_fork_server = len(sys.orig_argv) == 6 and "nemo_like.cluster.fork_server import main" in sys.orig_argv[2]
if is_fork_server or sys.orig_argv[1:] == ["-m", "nemo_like.preflight.child"]:
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.functional.warm_servers import hand_over, hand_over_check

    if is_fork_server:
        hand_over(*sys.orig_argv[3:])
    else:
        hand_over_check()
    del sys.path[0]
