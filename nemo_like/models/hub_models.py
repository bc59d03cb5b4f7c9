"""Finds checkpoints that are named as on the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION, and
downloads them."""

from __future__ import annotations

from pathlib import Path

# What a checkpoint has of use here; the same weights in other formats stay where they are.
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")


class NotOnHub(Exception):
    """A checkpoint does not come from the hub. The message is the hub library's reason, in one line."""


def is_hub_name(name: str) -> bool:
    """Return whether a name may be a name on the hub: no directory, and no path that could be one."""
    path = Path(name)
    is_path = path.is_absolute() or len(path.parts) > 2 or path.parts[:1] in [("..",), ("~",)]
    is_beside = len(path.parts) == 2 and path.parent.is_dir()
    return bool(name) and not (path.is_dir() or is_path or is_beside)


def hub_checkpoint(name: str, *, may_download: bool = True) -> str:
    """Return the directory of a checkpoint in the hub's cache on this machine, into which it is downloaded
    first where it is not there and ``may_download``. A revision is a branch, a tag or a commit.

    Raises NotOnHub when it does not come.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        return snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=[*_FILES],
            local_files_only=not may_download,
        )
    except (OSError, ValueError) as error:  # the hub's own errors are of these classes
        raise NotOnHub(" ".join(str(error).split())) from error
