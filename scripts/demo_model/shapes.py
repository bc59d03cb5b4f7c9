"""Pictures of red and blue circles, with the question how many are red."""

from __future__ import annotations

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

PROMPT = "<image>red="
SIDE = 56  # pixels
MAX_RED, MAX_BLUE = 4, 3
_RADIUS = 5


def shapes(rng: random.Random, side: int) -> tuple[Image.Image, int]:
    """Return a white picture of ``side`` x ``side`` pixels with circles that do not touch, up to 4 red and
    up to 3 blue ones, and the number of the red ones."""
    num_red, num_blue = rng.randint(0, MAX_RED), rng.randint(0, MAX_BLUE)
    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)
    centres: list[tuple[int, int]] = []
    while len(centres) < num_red + num_blue:
        x, y = (rng.randrange(_RADIUS + 1, side - _RADIUS - 1) for _ in range(2))
        if all((x - u) ** 2 + (y - v) ** 2 > (2 * _RADIUS + 2) ** 2 for u, v in centres):
            centres.append((x, y))
            colour = "red" if len(centres) <= num_red else "blue"
            draw.ellipse((x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS), fill=colour)
    return image, num_red


def write_records(directory: Path, name: str, count: int, seed: int, side: int) -> None:
    """Write ``name``.jsonl with ``count`` problems, and their pictures into the directory ``name``."""
    rng = random.Random(seed)
    (directory / name).mkdir(parents=True)
    lines = []
    for number in range(count):
        image, num_red = shapes(rng, side)
        path = f"{name}/{number:05d}.png"
        image.save(directory / path)
        lines.append(json.dumps({"prompt": PROMPT, "answer": str(num_red), "images": [path]}) + "\n")
    (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
