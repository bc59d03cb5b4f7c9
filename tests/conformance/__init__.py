"""Golden batches, what every loss gives on them, and how other frameworks are asked
(docs/reference/conformance.md)."""
