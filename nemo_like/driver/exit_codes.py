"""What ``run_grpo.py`` exits with. docs/faults.md says when."""

FINISHED = 0
FAILED = 1
REFUSED = 2
REWARDS_FAILED = 3
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: run it again, it continues
INTERRUPTED = 130  # as a shell says of SIGINT
