"""Runs from Python, such as a notebook: ``GRPO`` makes one, ``RunResult`` reads what it left."""
