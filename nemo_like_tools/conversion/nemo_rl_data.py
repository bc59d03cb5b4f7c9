"""Converts NeMo-RL's data sets and their environments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from nemo_like_tools.conversion.values import LEFT_OUT, Noted, Theirs, Untranslatable

# Names of data sets that NeMo-RL downloads itself: the place on the hub, the split, and the two fields.
_KNOWN = {
    "OpenMathInstruct-2": ("nvidia/OpenMathInstruct-2", "train_1M", "problem", "expected_answer"),
    "DeepScaler": ("agentica-org/DeepScaleR-Preview-Dataset", "train", "problem", "answer"),
    "AIME2024": ("HuggingFaceH4/aime_2024", "train", "problem", "answer"),
    "DAPOMath17K": ("BytedTsinghua-SIA/DAPO-Math-17k", "train", "prompt", "reward_model.ground_truth"),
    "DAPOMathAIME2024": ("BytedTsinghua-SIA/AIME-2024", "train", "prompt", "reward_model.ground_truth"),
    "AIME2026": ("MathArena/aime_2026", "train", "problem", "answer"),
}
# Data sets whose fields must be changed before they can be read here.
_TO_PREPARE = {
    "gsm8k": ("openai/gsm8k", "the answer is what follows #### in the field answer"),
    "GSM8K": ("openai/gsm8k", "the answer is what follows #### in the field answer"),
}
_RENAMED = {"input_key": "prompt_key", "output_key": "answer_key", "split": "split"}


def sources(value: Any, theirs: Theirs) -> Any:
    """Return the sources of ``data.train`` or ``data.validation``: one source, or a list."""
    if value is None:
        raise Untranslatable("has no source; set its path")
    if isinstance(value, Mapping):
        return _noted([_source(value, theirs)], is_single=True)
    return _noted([_source(each, theirs) for each in value], is_single=False)


def source_list(value: Any, theirs: Theirs) -> Any:
    """Return the sources of validation; NeMo-RL's held-out share of the training data cannot be converted."""
    if value is None:
        raise Untranslatable(
            "problems for validation are a source of their own; hold some out in a file and name it in "
            "data.validation.path"
        )
    return sources(value, theirs)


def _noted(found: list[tuple[dict[str, Any], list[str]]], *, is_single: bool) -> Any:
    value = found[0][0] if is_single else [source for source, _ in found]
    notes = [note for _, of_one in found for note in of_one]
    return Noted(value, "; ".join(notes)) if notes else value


def _source(given: Mapping[str, Any], theirs: Theirs) -> tuple[dict[str, Any], list[str]]:
    source, notes = _read_from(given, theirs)
    return {**source, **_prompts(given, theirs)}, notes


def _prompts(given: Mapping[str, Any], theirs: Theirs) -> dict[str, str | None]:
    """Return the texts of the prompt files that a data set has of its own."""
    files = (("prompt_file", "prompt_template", "{prompt}"), ("system_prompt_file", "system_prompt", None))
    return {key: prompt_text(given[name], theirs, place) for name, key, place in files if name in given}


def _read_from(given: Mapping[str, Any], theirs: Theirs) -> tuple[dict[str, Any], list[str]]:
    """Return where the problems of a data set are and by which fields, with notes for the user."""
    name = given.get("dataset_name") or theirs("data.default.dataset_name", "ResponseDataset")
    notes = [
        f"{key} is missing here: {why}"
        for key, why in (
            ("repeat", "grpo.num_val_generations_per_prompt samples several answers to each problem"),
            ("split_validation_size", "hold problems out in a file of their own"),
        )
        if given.get(key)
    ]
    if name in _KNOWN:
        path, split, prompt_key, answer_key = _KNOWN[name]
        split = given.get("split") or split
        source = {
            "kind": "huggingface", "path": path, "split": split, "prompt_key": prompt_key,
            "answer_key": answer_key,
        }  # fmt: skip
        return source, notes
    if name in _TO_PREPARE:
        path, change = _TO_PREPARE[name]
        file = f"data/{name}-{given.get('split') or 'train'}.jsonl"
        how = f"write {file} from {path} on the hub, with the fields prompt and answer: {change}"
        return {"kind": "jsonl", "path": file}, [*notes, how]
    if name != "ResponseDataset" or given.get("data_path") is None:
        raise Untranslatable(
            f"the data set {name} is not known here; write its problems into JSON lines and name the file in "
            "path"
        )
    path = str(given["data_path"])
    is_file = PurePath(path).suffix in (".jsonl", ".json")
    source = {"kind": "jsonl" if is_file else "huggingface", "path": path}
    source |= {ours: given[key] for key, ours in _RENAMED.items() if given.get(key)}
    if not is_file:
        source.setdefault("split", "train")
        if given.get("subset"):
            source["subset"] = given["subset"]
    defaults = {"prompt_key": theirs("data.default.input_key", "input")}
    defaults["answer_key"] = theirs("data.default.output_key", "output")
    return {**source, **{key: text for key, text in defaults.items() if key not in source}}, notes


def environment(value: Any, theirs: Theirs) -> Any:
    """Leave out the environment math, which is the same in both frameworks; others cannot be converted."""
    if value == "math":
        return LEFT_OUT
    raise Untranslatable(
        f"the environment {value} is not translated and math judges instead; add `- env@env.{value}: KIND` "
        f"to the defaults and set data.default.env={value}, see docs/how_to/environments.md"
    )


def prompt_text(value: Any, theirs: Theirs, place: str | None = None) -> str | None:
    """Return the text of a prompt file, with its ``{}`` replaced by ``place``."""
    if value is None:
        return None
    text = theirs.texts(str(value))
    if text is None:
        key = "system_prompt" if place is None else "prompt_template"
        raise Untranslatable(
            f"there is no file {value} beside the configuration or in a folder above it; write its text "
            f"into {key} of data.default, or of the source"
            + ("" if place is None else f", with {place} for {{}}")
        )
    if place is None:
        return text.strip()
    return text.strip().replace("{{", "\0").replace("}}", "\1").replace("{}", place) \
        .replace("\0", "{").replace("\1", "}")  # fmt: skip
