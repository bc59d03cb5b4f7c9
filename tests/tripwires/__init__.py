"""Bugs that a run's own checks must catch: ``mutations.py`` lists them, ``planting`` plants one in a run."""
