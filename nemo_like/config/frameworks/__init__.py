"""What other frameworks call the keys of this one, and how a configuration of theirs becomes one of ours."""
