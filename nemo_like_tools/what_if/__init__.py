"""What other settings would make of a recorded run: ``run_grpo.py --what-if``; see docs/what_if.md."""
