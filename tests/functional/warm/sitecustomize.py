"""Python imports this module at the start of every process that has this folder on PYTHONPATH. In the process
of a run's fork server it hands over to a fork of a warm one (``tests.functional.warm_servers``)."""

import sys

if len(sys.orig_argv) == 6 and "nemo_like.cluster.fork_server import main" in sys.orig_argv[2]:
    sys.path.insert(0, sys.orig_argv[3])
    from tests.functional.warm_servers import hand_over

    hand_over(*sys.orig_argv[3:])
    del sys.path[0]
