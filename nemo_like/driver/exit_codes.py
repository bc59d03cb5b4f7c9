"""The exit codes of ``run_grpo.py``; docs/reference/exit_codes.md says when each is given."""

FINISHED = 0
FAILED = 1
REFUSED = 2
REWARDS_FAILED = 3
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command continues the run
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
