"""Images of records: finds, reads and decodes them.

    record: path, bytes, data URL, Pillow image ──▶ Picture ──▶ bytes of its file ──▶ engine, image processor

Until a prompt is sampled, it holds only the paths of its images, or their compressed files.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

# Stands for an image in a prompt's text.
IMAGE_MARK = "<image>"
_DATA_URL = "data:"


class ImageError(ValueError):
    """An image cannot be used; the message names the record and the image, and says why."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One image of a prompt or of an observation, not decoded yet."""

    source: str | bytes  # the path of an image file, or the file's bytes
    where: str  # the record and the image's number in it, for errors

    def read(self) -> bytes:
        """Return the bytes of the image's file. Raises ImageError when it cannot be read."""
        if isinstance(self.source, bytes):
            return self.source
        try:
            return Path(self.source).read_bytes()
        except OSError as error:
            raise ImageError(
                f"{self.where}: {self.source} cannot be read ({error.strerror}); a path that is not absolute "
                "begins at the directory of the data file, or where the environment runs"
            ) from error

    def decoded(self) -> Image:
        """Return the decoded image. Raises ImageError when it cannot be read or is no image."""
        try:
            return decoded(self.read())
        except ImageError:
            raise
        except Exception as error:  # decoders of broken files raise errors of many kinds
            raise ImageError(f"{self.where}: {self._name} is no image that can be read ({error})") from error

    def size(self) -> tuple[int, int]:
        """Return (height, width) in pixels, from the beginning of the file. Raises as ``decoded`` does."""
        from PIL import Image as images

        try:
            data = self.source if isinstance(self.source, str) else BytesIO(self.source)
            with images.open(data) as image:
                return image.height, image.width
        except FileNotFoundError:
            self.read()
            raise
        except Exception as error:
            raise ImageError(f"{self.where}: {self._name} is no image that can be read ({error})") from error

    @property
    def _name(self) -> str:
        return self.source if isinstance(self.source, str) else f"its {len(self.source):,} bytes"


def decoded(data: bytes) -> Image:
    """Decode an image file into red, green and blue, as both engine and trainer see it."""
    from PIL import Image as images

    with images.open(BytesIO(data)) as image:
        return image.convert("RGB")


def pictures_of(values: Any, directory: str | None, where: str) -> tuple[Picture, ...]:
    """Return the pictures of a record's field: one image, a list of images, or None for no image.

    Relative paths begin at ``directory``. Raises ImageError for a value that is no image.
    """
    if values is None:
        return ()
    is_one = isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence)
    listed = [values] if is_one else list(values)
    return tuple(
        picture_of(value, directory, f"{where}, image {number}") for number, value in enumerate(listed, 1)
    )


def picture_of(value: Any, directory: str | None, where: str) -> Picture:
    """Return the picture that a record describes by a path, a data URL, the bytes of a file, a Pillow image,
    or a mapping with one of ``bytes``, ``path``, ``image``, ``url`` and ``image_url``. A ``Picture`` is
    returned unchanged.

    Raises ImageError for any other value, and for an address on a network.
    """
    if isinstance(value, Picture):
        return value
    if isinstance(value, Mapping):
        given = [value[key] for key in ("bytes", "path", "image", "url", "image_url") if value.get(key)]
        if not given:
            raise ImageError(f"{where}: {sorted(value)} has none of bytes, path, image, url and image_url")
        return picture_of(given[0], directory, where)
    if isinstance(value, bytes | bytearray):
        return Picture(bytes(value), where)
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        if value.startswith(_DATA_URL):
            return Picture(_of_data_url(value, where), where)
        if "://" in value and not value.startswith("file://"):
            raise ImageError(f"{where}: {value} is on a network; download it, and give its path")
        return Picture(str(Path(directory or "", value.removeprefix("file://"))), where)
    if hasattr(value, "save") and hasattr(value, "convert"):
        file = BytesIO()
        value.convert("RGB").save(file, "PNG")
        return Picture(file.getvalue(), where)
    raise ImageError(f"{where}: {type(value).__name__} is neither a path, bytes nor an image of Pillow")


def _of_data_url(url: str, where: str) -> bytes:
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not in base64")
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{where}: its data URL cannot be read ({error})") from error
