"""Whole runs that are disturbed at random; ``scripts/chaos.py`` is the command."""
