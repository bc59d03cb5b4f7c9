"""Tiny checkpoints of real model families: their chat templates, special tokens and ends, without weights.

``families`` has one entry a family, ``golden/`` what the model reads of a conversation with two calls of a
tool, token by token.
``python -m tests.unit.data.families.transcript`` writes the golden files anew; look at what changed.
"""
