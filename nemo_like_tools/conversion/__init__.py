"""Converts configurations of other frameworks into configurations of this framework."""
