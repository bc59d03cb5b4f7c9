"""The shipped filters of samples: one module each, whose name is the filter's and which has a ``KIND``."""
