"""Writes the chat template of an exported model. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path

# transformers prefers this file to the template in tokenizer_config.json.
_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_CONFIG_KEY = "chat_template"


def set_chat_template(checkpoint: Path, template: str) -> None:
    """Make ``template`` the chat template of a Hugging Face checkpoint directory, replacing its own."""
    (checkpoint / _TEMPLATE_FILE).write_text(template, encoding="utf-8")
    file = checkpoint / _CONFIG_FILE
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.pop(_CONFIG_KEY, None) is not None:
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
