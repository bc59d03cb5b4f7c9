"""The shipped storages behind the data plane: one module each, whose name is ``data_plane.backend``."""
