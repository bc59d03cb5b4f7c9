"""Fixtures of the functional tests that those on GPUs use too."""

from __future__ import annotations

from tests.functional.conftest import arithmetic_model, private_ray

__all__ = ["arithmetic_model", "private_ray"]
