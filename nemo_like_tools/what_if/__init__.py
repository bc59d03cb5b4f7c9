"""Predicts a recorded run under other settings: ``run_grpo.py --what-if``; see docs/what_if.md."""
