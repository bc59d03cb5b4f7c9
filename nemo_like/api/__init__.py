"""Runs from Python, such as a notebook: ``GRPO`` makes a run, ``RunResult`` reads what the run left."""
