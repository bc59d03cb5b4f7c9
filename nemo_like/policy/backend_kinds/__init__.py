"""The shipped training backends: one module each, whose name is ``policy.backend``."""
