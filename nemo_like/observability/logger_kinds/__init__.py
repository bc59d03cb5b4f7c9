"""The shipped loggers: one module each, whose name is the group of its keys below ``logger``."""
