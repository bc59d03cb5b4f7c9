"""The recipes, and what their names say."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.config.checkpoints import REPOSITORY

RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
GPUS_PER_NODE = 8


def num_nodes(recipe: Path) -> int:
    """Return the number of nodes at the end of the recipe's name, which is like ``grpo-qwen3-8b-4n8g``."""
    match = re.search(rf"-(\d+)n{GPUS_PER_NODE}g$", recipe.stem)
    assert match, f"{recipe.name} does not end in nodes and GPUs per node, like -1n8g"
    return int(match[1])
