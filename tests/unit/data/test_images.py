"""Images of records: where they may be, and what is said of one that cannot be used."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from nemo_like.configuration import Config
from nemo_like.data.datasets import build_dataset
from nemo_like.data.encoder import PromptEncoder
from nemo_like.data.image_marks import with_marks, with_parts_as_marks
from nemo_like.data.images import ImageError, Picture, picture_of, pictures_of
from nemo_like.data.interface import Encoded, Message, Observation, TaskPrompt
from nemo_like.data.records import RecordFields
from nemo_like.data.vision import Vision
from scripts.demo_model.tiny_tokenizer import save_tokenizer, vocabulary
from scripts.demo_model.tiny_vlm import VISION_TOKENS, image_processor, tiny_vlm_config

START, END, IMAGE, VIDEO = (vocabulary(VISION_TOKENS)[token] for token in VISION_TOKENS)
FIELDS = RecordFields("prompt", "answer", images="images")


def image(height: int = 56, width: int = 56, colour: str = "red") -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def png(of: Image.Image | None = None) -> bytes:
    file = BytesIO()
    (of or image()).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without weights."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_vlm_config().save_pretrained(path)
    image_processor().save_pretrained(path)
    save_tokenizer(path, VISION_TOKENS)
    return path


@pytest.fixture(scope="module")
def encoder(checkpoint: Path) -> PromptEncoder:
    return PromptEncoder(checkpoint, None, 30)


def example(*images: Any, prompt: str = "<image>red=") -> TaskPrompt:
    return TaskPrompt(prompt, "1", images=pictures_of(list(images), None, "data.jsonl:3"))


def test_an_image_may_be_a_path_bytes_a_data_url_an_image_or_a_mapping_of_one(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    for value in (
        "a.png",
        Path("a.png"),
        f"file://{tmp_path / 'a.png'}",
        png(),
        image(),
        url,
        {"bytes": png(), "path": "elsewhere.png"},
        {"bytes": None, "path": "a.png"},
        {"type": "image_url", "image_url": {"url": url}},
    ):
        picture = picture_of(value, str(tmp_path), "row 1")
        assert np.asarray(picture.decoded()).tolist() == np.asarray(image()).tolist()
        assert picture.size() == (56, 56)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("missing.png", r"data.jsonl:3, image 1: missing.png cannot be read \(No such file"),
        (b"no image", r"data.jsonl:3, image 1: its 8 bytes is no image that can be read"),
        (png()[:60], r"data.jsonl:3, image 1: its 60 bytes is no image that can be read"),
        ("https://example.org/a.png", "data.jsonl:3, image 1: https://example.org/a.png is on a network"),
        ("data:image/png;base64,!", "data.jsonl:3, image 1: its data URL cannot be read"),
        (7, "data.jsonl:3, image 1: int is neither a path, bytes nor an image of Pillow"),
        ({"name": "a.png"}, r"data.jsonl:3, image 1: \['name'\] has none of bytes, path"),
    ],
)
def test_an_image_that_cannot_be_used_is_named_with_file_and_row(
    encoder: PromptEncoder, value: Any, message: str
) -> None:
    with pytest.raises(ImageError, match=message):
        encoder.check_images(example(value))


def test_an_image_that_is_too_large_for_the_context_says_how_large_it_may_be(checkpoint: Path) -> None:
    with pytest.raises(
        ImageError, match=r"data.jsonl:3, image 1: 56 x 56 pixels take 4 tokens, .* at most 3;"
    ):
        PromptEncoder(checkpoint, None, 3).lengths([example(image())])


def test_a_record_names_its_images_beside_its_text_or_in_parts_of_messages() -> None:
    a, b = png(image(colour="red")), png(image(colour="blue"))
    given = FIELDS.task_prompt(
        {"prompt": "<image> and <image>", "answer": 1, "images": [a, b], "n": 2}, "row"
    )
    assert [picture.source for picture in given.images] == [a, b]
    assert given.data == {"n": 2}
    alone = FIELDS.task_prompt({"prompt": "which?", "answer": 1, "images": a}, "row")
    assert (alone.prompt, len(alone.images)) == ("<image>which?", 1)
    text = FIELDS.task_prompt({"prompt": "no image", "answer": 1, "images": None}, "row")
    assert (text.prompt, text.images) == ("no image", ())
    parts = [
        {"type": "text", "text": "is "},
        {"type": "image"},
        {"type": "text", "text": " like "},
        {"type": "image", "image": b},
    ]
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}]
    said = FIELDS.task_prompt({"prompt": messages, "answer": 1, "images": [a]}, "row")
    assert said.prompt == (Message("system", "Look."), Message("user", "is <image> like <image>"))
    assert [picture.source for picture in said.images] == [a, b]


def test_images_without_a_place_and_places_without_an_image_are_errors() -> None:
    picture = Picture(b"", "row")
    with pytest.raises(ImageError, match=r"row: the text has <image> 1 times, and there are 2 images"):
        with_marks("<image>?", 2, "row")
    message = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(ImageError, match="row, image 1: an image part of the messages has no image"):
        with_parts_as_marks(message, (), None, "row")
    with pytest.raises(ImageError, match="row: 1 of its 2 images have no image part"):
        with_parts_as_marks(message, (picture, picture), None, "row")
    with pytest.raises(ImageError, match="row, image 1: a part of a message is of type 'video'"):
        with_parts_as_marks([{"role": "user", "content": [{"type": "video"}]}], (), None, "row")


def test_images_come_before_the_first_text_of_the_user() -> None:
    prompt = (Message("system", "Look."), Message("user", "?"), Message("user", "!"))
    assert with_marks(prompt, 2, "row") == (prompt[0], Message("user", "<image><image>?"), prompt[2])


def test_jsonl_and_huggingface_sources_read_images(demo: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"prompt": "red=", "answer": "1", "images": ["a.png"]}) + "\n"
    )
    records = {"prompt": ["red="], "answer": ["1"], "images": [[{"bytes": png(), "path": None}]]}
    features = datasets.Features(
        prompt=datasets.Value("string"),
        answer=datasets.Value("string"),
        images=datasets.List(datasets.Image()),
    )
    saved = datasets.Dataset.from_dict(records, features=features)
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "p.parquet")
    for kind, name in (("jsonl", "p.jsonl"), ("huggingface", "saved"), ("huggingface", "p.parquet")):
        keys = f"kind: {kind}, path: {tmp_path / name}, images_key: images, split: train"
        (source,) = demo(f"data.train=[{{{keys}}}]").data.train
        problem = build_dataset(source, "train")[0]
        assert problem.prompt == "<image>red="
        assert problem.images[0].size() == (56, 56), kind


def test_a_prompt_has_a_token_for_each_feature_of_its_images(encoder: PromptEncoder) -> None:
    ids = vocabulary(VISION_TOKENS)
    red = [ids[character] for character in "red="]
    both = example(image(), image(28, 56), prompt="<image><image>red=")
    text = TaskPrompt("red=", "1")
    expected = [START, *[IMAGE] * 4, END, START, *[IMAGE] * 2, END, *red]
    assert encoder.lengths([both, text]) == [len(expected), len(red)]
    seen, plain = encoder.encode([both, text])
    assert seen.token_ids == tuple(expected)
    assert [grid.tolist() for grid in seen.columns["image_grid_thw"]] == [[1, 4, 4], [1, 2, 4]]
    assert [pixels.shape for pixels in seen.columns["pixel_values"]] == [(16, 1176), (8, 1176)]
    assert seen.images == (png(), png(image(28, 56)))
    assert (plain.token_ids, plain.images, dict(plain.columns)) == (tuple(red), (), {})


def test_a_prompt_whose_image_is_gone_says_so_and_keeps_the_tokens_of_its_text(
    encoder: PromptEncoder, tmp_path: Path
) -> None:
    gone, here = example(str(tmp_path / "gone.png")), example(image())
    failed, seen = encoder.encode([gone, here])
    assert failed.failure is not None and "gone.png cannot be read" in failed.failure
    assert IMAGE not in failed.token_ids and not failed.columns
    assert seen.failure is None


def test_the_token_of_an_image_in_a_text_without_image_is_an_error(encoder: PromptEncoder) -> None:
    with pytest.raises(ImageError, match="has the token of an image 1 times, and 0 images"):
        encoder.lengths([TaskPrompt("<|image_pad|>red=", "1")])


def test_a_model_without_a_vision_tower_reads_no_images(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert Vision.of(tmp_path, str) is None
    with pytest.raises(ImageError, match=r"data.jsonl:3, image 1: the model has no vision tower"):
        PromptEncoder(tmp_path, None, 30).lengths([example(image())])


def observed(encoder: PromptEncoder, text: str, *images: Any) -> Encoded:
    pictures = pictures_of(list(images), None, "the observation")
    return encoder.encode_observation(TaskPrompt("red=", ""), Observation(text, pictures), "user", 5)


def test_an_observation_has_a_token_for_each_feature_of_its_images(encoder: PromptEncoder) -> None:
    ids = vocabulary(VISION_TOKENS)
    seen = observed(encoder, "1<image>=", image(28, 56))
    assert seen.token_ids == (ids["1"], START, IMAGE, IMAGE, END, ids["="])
    assert seen.images == (png(image(28, 56)),)
    assert [grid.tolist() for grid in seen.columns["image_grid_thw"]] == [[1, 2, 4]]
    assert observed(encoder, "1=") == Encoded((ids["1"], ids["="]))


def test_an_observation_whose_image_cannot_be_used_says_so(
    encoder: PromptEncoder, checkpoint: Path, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path)
    for failed, reason in (
        (observed(encoder, "<image>", b"no image"), "the observation, image 1: its 8 bytes is no image"),
        (observed(encoder, "<image>", image(28, 2828 * 3)), r"must be smaller than 200"),
        (observed(encoder, "<|image_pad|>"), "has the token of an image 1 times, and 0 images"),
        (observed(PromptEncoder(checkpoint, None, 3), "<image>", image()), "take 4 tokens, .* at most 3"),
        (observed(PromptEncoder(checkpoint, None, 5), "<image>", image()), "has 6 tokens, .* at most 5"),
        (observed(PromptEncoder(tmp_path, None, 30), "<image>", image()), "the model has no vision tower"),
    ):
        assert failed.failure is not None and not failed.columns
        assert re.search(reason, failed.failure), failed.failure


def test_a_prompt_whose_image_became_too_large_fails_alone(checkpoint: Path, tmp_path: Path) -> None:
    image(28, 28).save(tmp_path / "a.png")
    grown = example(str(tmp_path / "a.png"))
    encoder = PromptEncoder(checkpoint, None, 8)
    assert encoder.lengths([grown]) == [7]
    image(56, 56).save(tmp_path / "a.png")
    (failed,) = encoder.encode([grown])
    assert failed.failure is not None and "has 10 tokens, and a prompt has at most 8" in failed.failure
    assert IMAGE not in failed.token_ids
