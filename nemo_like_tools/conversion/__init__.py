"""Makes configurations of other frameworks ones of this framework."""
