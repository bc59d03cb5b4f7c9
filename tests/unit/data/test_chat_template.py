from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nemo_like.data.chat_template import set_chat_template
from scripts.demo_model.tiny_tokenizer import save_tokenizer

OWN, OTHER = "{{ messages[0].content }}", "{{ messages[0].role }}: größer"


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", None])
def test_the_tokenizer_has_the_template_wherever_it_had_its_own(place: str | None, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if place == "tokenizer_config.json":
        (tmp_path / place).write_text(json.dumps({**config, "chat_template": OWN}))
    elif place is not None:
        (tmp_path / place).write_text(OWN)
    set_chat_template(tmp_path, OTHER)
    assert AutoTokenizer.from_pretrained(tmp_path, local_files_only=True).chat_template == OTHER
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == config
