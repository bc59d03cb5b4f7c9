"""Predicts a recorded run under other settings: ``run_grpo.py --what-if``; see docs/how_to/what_if.md."""
