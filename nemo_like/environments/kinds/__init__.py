"""The shipped kinds of environments: one module each, whose name is the kind's and which has a ``KIND``."""
