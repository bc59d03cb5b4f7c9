"""What vLLM is given of a request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nemo_like.generation import engine_requests
from nemo_like.generation.engine_requests import as_prompt
from nemo_like.generation.interface import GroupRequest

MODEL = SimpleNamespace(image_token_id=9)


def test_a_prompt_of_text_stays_as_it_is() -> None:
    request = GroupRequest("r", (4, 9, 9, 5), (0,))
    assert as_prompt(request, MODEL)["prompt_token_ids"] == [4, 9, 9, 5]


def test_an_image_has_its_token_once_since_vllm_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_requests, "decoded", bytes.decode)
    request = GroupRequest("r", (9, 9, 9, 4, 4, 9, 9), (0,), images=(b"first", b"second"))
    prompt = as_prompt(request, MODEL)
    assert prompt["prompt_token_ids"] == [9, 4, 4, 9]
    assert prompt["multi_modal_data"] == {"image": ["first", "second"]}
