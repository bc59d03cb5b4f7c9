"""The shipped kinds of losses: one module each, whose name is the kind's and which has a ``KIND``."""
