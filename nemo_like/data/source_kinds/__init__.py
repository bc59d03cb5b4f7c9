"""The shipped kinds of data sources: one module each, whose name is the kind's and which has a ``KIND``."""
