"""Models of transformers that read images, as the FSDP backend uses them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.policy.fsdp.image_text import check_takes_features


def of_519(input_ids: Any = None, mm_encoder_outputs: Any = None, **options: Any) -> None: ...


def of_517(input_ids: Any = None, **options: Any) -> None: ...


def test_a_model_that_would_pass_over_images_is_refused() -> None:
    check_takes_features(SimpleNamespace(model=SimpleNamespace(forward=of_519)))  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r"takes no features of images .* install transformers 5\.19"):
        check_takes_features(SimpleNamespace(model=SimpleNamespace(forward=of_517)))  # type: ignore[arg-type]
