"""Conversions that the table of TRL names.

TRL counts a batch by the samples of one process, and its steps by updates of the optimizer; a run here counts
the samples of all processes, and its steps by rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from pathlib import PurePath
from typing import Any

from nemo_like_tools.conversion.values import (
    LEFT_OUT,
    UNLIMITED_STEPS,
    Noted,
    Theirs,
    Untranslatable,
    all_tokens,
    model_directory,
    path,
)

_GPUS_OF_A_NODE = 8
_KINDS = {"cispo": "cispo", "sapo": "sapo"}  # losses that have a kind of their own here
_TOKEN_LEVEL = {"dapo": True, "bnpo": True, "cispo": True, "grpo": False, "dr_grpo": False, "sapo": False}
_MATH = ("accuracy_reward", "reasoning_accuracy_reward")  # both compare by math-verify
_FORMAT = "think_format_reward"
_THINKS = r"^<think>(?!.*<think>)(.*?)</think>.*$"
_NAMES = {_FORMAT: "format", **dict.fromkeys(_MATH, "math")}
# Further sampling arguments that have keys of generation here.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop")


def prompts_per_step(value: Any, theirs: Theirs) -> int:
    """Return the number of prompts of a step, whose samples TRL divides over processes."""
    samples, group = _samples_of_step(theirs), int(theirs("num_generations", 8))
    if samples % group:
        raise Untranslatable(
            f"{samples} samples are no whole groups of {group}; set grpo.num_prompts_per_step, or give "
            "the number of processes, num_processes=N"
        )
    return samples // group


def samples_of_update(value: Any, theirs: Theirs) -> int:
    """Return the number of samples of an update of the optimizer."""
    samples, of_step = _samples_of_update(theirs), _samples_of_step(theirs)
    if of_step % samples:
        raise Untranslatable(
            f"{of_step} samples of a step are no whole updates of {samples}; set "
            "policy.train_global_batch_size"
        )
    return samples


def micro_batch(value: Any, theirs: Theirs) -> int:
    """Return the number of samples of one process at once."""
    return int(theirs("per_device_train_batch_size", 8))


def training_gpus(value: Any, theirs: Theirs) -> int:
    """Return the number of the policy's replicas: each process of TRL is one."""
    return _processes(theirs)


def gpus_per_node(value: Any, theirs: Theirs) -> int:
    """Return the number of GPUs of a node, on which a server's engines have GPUs of their own."""
    each = _processes(theirs) // int(theirs("num_machines", 1))
    return each + _engine(theirs) if _has_server(theirs) and not _has_node_for_server(theirs) else each


def nodes(value: Any, theirs: Theirs) -> int:
    """Return the number of nodes, with one for a server that does not fit beside the training."""
    return int(theirs("num_machines", 1)) + _has_node_for_server(theirs)


def address(value: Any, theirs: Theirs) -> Any:
    """Return the address of the Ray cluster that a run on several nodes joins; one node needs none."""
    return "auto" if nodes(value, theirs) > 1 else LEFT_OUT


def num_engines(value: Any, theirs: Theirs) -> Any:
    """Return the number of engines on the GPUs of the training, or of TRL's server."""
    if _has_server(theirs):
        gpus = gpus_per_node(value, theirs) if _has_node_for_server(theirs) else _engine(theirs)
        return Noted(
            gpus // _engine(theirs), f"the server's engines got {gpus} GPUs; set generation.num_engines"
        )
    if _processes(theirs) % _engine(theirs):
        raise Untranslatable(f"{_processes(theirs)} GPUs do not hold whole engines of {_engine(theirs)}")
    return _processes(theirs) // _engine(theirs)


def steps(value: Any, theirs: Theirs) -> Any:
    """Return the number of steps of a number of updates; for -1, where epochs end the run, no limit."""
    return _length(theirs) if int(value) > 0 else UNLIMITED_STEPS


def epochs(value: Any, theirs: Theirs) -> Any:
    """Return a number of epochs, unless the number of updates is given."""
    return LEFT_OUT if int(theirs("max_steps", -1)) > 0 else float(value)


def in_steps(value: Any, theirs: Theirs, strategy: str) -> int:
    """Return a period in updates as a period in steps; 0 means never."""
    if (kind := theirs(strategy, "no")) == "no":
        return 0
    period = float(value or theirs("logging_steps", 500))
    if kind == "epoch" or period < 1:
        raise Untranslatable("a period counts steps; set it to a number")
    return max(1, ceil(period / _updates_of_step(theirs)))


def val_period(value: Any, theirs: Theirs) -> int:
    """Return the period of validations in steps; 0 means never."""
    return in_steps(theirs("eval_steps"), theirs, "eval_strategy")


def kept(value: Any, theirs: Theirs) -> Any:
    """Return the number of checkpoints that are kept besides the latest."""
    return LEFT_OUT if value is None else max(1, int(value) - 1)


def entropy_coef(value: Any, theirs: Theirs) -> Any:
    """Return the entropy's coefficient; 0 becomes null where it stays, and the entropy is not computed."""
    return value if theirs("use_adaptive_entropy", False) else value or None


def entropy_target(value: Any, theirs: Theirs) -> Any:
    """Return the entropy that a coefficient holds, where it moves."""
    return theirs("entropy_target", 0.2) if value else LEFT_OUT


def reference_steps(value: Any, theirs: Theirs) -> Any:
    """Return every how many steps the reference is renewed, for their number of updates."""
    if not value:
        return None
    return max(1, round(int(theirs("ref_model_sync_steps", 512)) / _updates_of_step(theirs)))


def decay_style(value: Any, theirs: Theirs) -> str:
    """Return the style of the decay, which lasts to the end of the run."""
    styles = {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
    }
    style = styles.get(str(value).removesuffix("_with_min_lr"))
    if style is None:
        raise Untranslatable(f"only {', '.join(styles)} can be translated; set policy.scheduler.decay_style")
    return style


def decay_updates(value: Any, theirs: Theirs) -> Any:
    """Return the number of updates of the decay, if the rate decays and epochs do not end the run."""
    is_counted = int(theirs("max_steps", -1)) > 0 and not str(value).startswith("constant")
    return _updates_of_run(theirs) if is_counted else LEFT_OUT


def min_lr(value: Any, theirs: Theirs) -> Any:
    """Return the lowest learning rate, which TRL gives as a rate or as a share of the highest."""
    given = dict(value or {})
    if "min_lr_rate" in given:
        return float(given["min_lr_rate"]) * float(theirs("learning_rate", 1e-6))
    return float(given["min_lr"]) if "min_lr" in given else LEFT_OUT


def warmup(value: Any, theirs: Theirs) -> int:
    """Return the number of updates of a warm-up; a number below 1 is a share of the run's updates."""
    share = float(value or 0)
    return int(share) if share >= 1 or not share else ceil(share * _updates_of_run(theirs))


def loss_kind(value: Any, theirs: Theirs) -> str:
    """Return the kind of the loss."""
    name = str(theirs("loss_type", "dapo"))
    if name not in _TOKEN_LEVEL:
        raise Untranslatable(
            f"only {', '.join(_TOKEN_LEVEL)} can be translated; write the loss as "
            "loss_fn.kind=package.module:name, see docs/how_to/own_loss.md"
        )
    is_by_sample = theirs("importance_sampling_level", "token") == "sequence"
    return _KINDS.get(name, "gspo" if is_by_sample else "policy_gradient")


def token_level(value: Any, theirs: Theirs) -> Any:
    """Return whether the loss is a mean over tokens rather than over samples."""
    if value not in _TOKEN_LEVEL:
        return LEFT_OUT
    is_token = _TOKEN_LEVEL[value]
    note = "a mean over the tokens of the update, not of each micro-batch, see docs/reference/conventions.md"
    return Noted(is_token, note) if value == "bnpo" else is_token


def normalizer(value: Any, theirs: Theirs) -> Any:
    """Return the number by which the sum over a sample's tokens is divided, for Dr.GRPO."""
    return int(theirs("max_completion_length", 512)) if value == "dr_grpo" else LEFT_OUT


def clip(value: Any, theirs: Theirs, bound: str) -> Any:
    """Return how far from 1 the ratio is clipped; CISPO has only an upper bound, on the ratio itself."""
    is_cispo = theirs("loss_type", "dapo") == "cispo"
    if bound == "low":
        return 0.999 if is_cispo else value
    high = theirs("epsilon_high", value)
    return float(high) - 1 if is_cispo else high


def scaled(value: Any, theirs: Theirs) -> bool:
    """Return whether advantages are divided by the standard deviation of their group."""
    if value == "batch":
        raise Untranslatable("rewards are scaled by their group; set grpo.normalize_rewards")
    return value not in ("none", False)


def is_corrected(value: Any, theirs: Theirs) -> bool:
    """Return whether the loss is weighted by the ratio to the engine's log-probs, as TRL does with vLLM."""
    return bool(value) and bool(theirs("use_vllm", False))


def correction(value: Any, theirs: Theirs) -> Any:
    """Return how the weights are bounded, if the loss is weighted."""
    if not is_corrected(theirs("vllm_importance_sampling_correction", True), theirs):
        return LEFT_OUT
    kinds = {"token_truncate": "tis", "token_mask": "icepop", "sequence_mask": "seq_mask"}
    if value not in kinds:
        raise Untranslatable(f"only {', '.join(kinds)} can be translated; see docs/reference/conventions.md")
    note = "a sample is judged by the geometric mean of its weights, not by their product"
    return Noted(kinds[value], note) if value == "sequence_mask" else kinds[value]


def bound(value: Any, theirs: Theirs) -> Any:
    """Return a bound of the weights, if the loss is weighted."""
    is_on = is_corrected(theirs("vllm_importance_sampling_correction", True), theirs)
    return float(value) if is_on and value is not None else LEFT_OUT


def no_lower_bound(value: Any, theirs: Theirs) -> Any:
    """Return a lower bound of the weights that is next to none, where masks need one and TRL has none."""
    is_mask = str(value).endswith("_mask") and theirs("vllm_importance_sampling_clip_min") is None
    return bound(1e-6, theirs) if is_mask else LEFT_OUT


def total_length(value: Any, theirs: Theirs) -> int:
    """Return the limit on the length of prompt and response together."""
    both = int(theirs("max_prompt_length", 512)) + int(theirs("max_completion_length", 512))
    return min(both, int(theirs("vllm_max_model_length", both)))


def regex(value: Any, theirs: Theirs) -> Any:
    """Return a regular expression as the grammar of responses."""
    return {"regex": str(value)} if value else LEFT_OUT


def sampling(value: Any, theirs: Theirs, key: str) -> Any:
    """Return one key of the further sampling arguments, and raise Untranslatable for unknown ones."""
    given = dict(value or {})
    if unknown := sorted(set(given) - set(_SAMPLING)):
        raise Untranslatable(
            f"{', '.join(unknown)} has no key here, since log-probs are those of the distribution that is "
            f"sampled; there are {', '.join(_SAMPLING)}"
        )
    if key not in given:
        return LEFT_OUT
    return all_tokens(given[key], theirs) if key == "top_k" else given[key]


def adapters(value: Any, theirs: Theirs) -> Any:
    """Return a setting of adapters, if there are adapters."""
    return value if theirs("use_peft", False) else LEFT_OUT


def targets(value: Any, theirs: Theirs) -> Any:
    """Return the layers that get adapters, if there are adapters."""
    if not theirs("use_peft", False):
        return LEFT_OUT
    if value is None:
        return Noted(["q_proj", "v_proj"], "the layers that PEFT chooses for most models")
    names = [value] if isinstance(value, str) else list(value)
    return ["all-linear"] if "all-linear" in names else names


def saves(value: Any, theirs: Theirs) -> bool:
    """Return whether there are checkpoints."""
    return bool(value != "no")


def source(value: Any, theirs: Theirs, split: str = "dataset_train_split") -> Any:
    """Return the source that ``dataset_name`` and the keys beside it name."""
    if split == "dataset_test_split" and theirs("eval_strategy", "no") == "no":
        return _train_source(value, theirs, "dataset_train_split")
    return _noted(_train_source(value, theirs, split), theirs)


def mixture(value: Any, theirs: Theirs, is_held_out: bool = False) -> Any:
    """Return the sources of a mixture, each with its share as its weight.

    With ``test_split_size`` the end of each source is held out.
    """
    sources = []
    for given in value or ():
        files = given.get("data_files")
        if isinstance(files, list | Mapping):
            raise Untranslatable("several data_files are not translated; write a source for each")
        name = str(files or given["path"])
        weight = {"weight": float(given["fraction"])} if given.get("fraction") else {}
        split = _cut(given.get("split", "train"), theirs("test_split_size"), is_held_out, len(value) == 1)
        sources.append({**_read_from(name, given.get("name"), split, theirs), **weight})
    return _noted(sources, theirs) if sources else LEFT_OUT


def reward(value: Any, theirs: Theirs, part: str) -> Any:
    """Return a setting of the environments that give the rewards, which ``part`` names."""
    weights = _reward_weights(theirs)
    if part == "format":
        return "regex" if "format" in weights else LEFT_OUT
    if part == "pattern":
        return {"pattern": _THINKS} if "format" in weights else LEFT_OUT
    if part == "model":
        return "reward_model" if "quality" in weights else LEFT_OUT
    if len(weights) == 1:
        return next(iter(weights)) if part == "name" and "math" not in weights else LEFT_OUT
    return {"name": "all", "sum": "weighted_sum", "components": {"components": weights}}[part]


def reward_model(value: Any, theirs: Theirs) -> Any:
    """Return the options of the environment that has the reward model."""
    model = model_directory(value, theirs)
    note = "it judges on the CPU; where a GPU is free for it, set env.quality.options.device=cuda"
    if not isinstance(model, Noted):
        return Noted({"model_name": model}, note)
    return Noted({"model_name": model.value}, f"{model.note}; {note}")


def quantized(value: Any, theirs: Theirs) -> Any:
    """Leave out a model that is not quantised; others cannot be converted."""
    if not value:
        return LEFT_OUT
    raise Untranslatable("a model trains in policy.precision; set policy.lora.enabled for less memory")


def _reward_weights(theirs: Theirs) -> dict[str, float]:
    """Return the weight of each environment that gives a reward. Raises Untranslatable for another reward."""
    given = theirs("reward_funcs", [])
    names = [given] if isinstance(given, str) else list(given)
    others = [name for name in names if name not in _NAMES]
    if others:
        raise Untranslatable(
            f"{', '.join(others)} is Python of yours, and math judges instead; write it as function(turn, "
            "**arguments) of the environment function, see docs/how_to/own_environment.md, or give it to "
            "GRPO in Python as it is"
        )
    keys = [_NAMES[name] for name in names]
    keys = ["quality"] * bool(theirs("reward_model_name_or_path")) + keys
    weights = theirs("reward_weights") or [1.0] * len(keys)
    return dict(zip(keys, map(float, weights), strict=True)) or {"math": 1.0}


def _cut(split: str, size: Any, is_held_out: bool, is_alone: bool) -> str:
    """Return the part of a split that trains, or that is held out: a share, or a number of problems."""
    if size is None:
        return split
    share = 100 * float(size)
    if isinstance(size, float) and size < 1 and share == round(share):
        at = f"{100 - round(share)}%"
    elif is_alone and size >= 1:
        at = f"-{int(size)}"
    else:
        raise Untranslatable(
            f"test_split_size={size} is no whole per cent of each source; cut them by their split, such as "
            'split: "train[:99%]"'
        )
    return f"{split}[{at}:]" if is_held_out else f"{split}[:{at}]"


def _train_source(name: Any, theirs: Theirs, split: str) -> dict[str, Any]:
    return _read_from(str(name), theirs("dataset_config"), str(theirs(split, split.split("_")[1])), theirs)


def _read_from(name: str, subset: Any, split: str, theirs: Theirs) -> dict[str, Any]:
    is_lines = PurePath(name).suffix == ".jsonl"
    kind = {"kind": "jsonl"} if is_lines else {"kind": "huggingface", "split": split}
    more = {"subset": str(subset)} if subset and not is_lines else {}
    rewards = theirs("reward_funcs", [])
    is_math = any(each in _MATH for each in ([rewards] if isinstance(rewards, str) else rewards))
    answer = "solution" if is_math else "answer"
    return {**kind, "path": path(name, theirs), **more, "prompt_key": "prompt", "answer_key": answer}


def _noted(found: Any, theirs: Theirs) -> Any:
    key = (found[0] if isinstance(found, list) else found)["answer_key"]
    note = f"TRL's rewards take columns by name; answer_key: {key} is the reference answer, or change it"
    return Noted(found[0] if isinstance(found, list) and len(found) == 1 else found, note)


def _processes(theirs: Theirs) -> int:
    return int(theirs("num_processes", 8))


def _engine(theirs: Theirs) -> int:
    return int(theirs("vllm_tensor_parallel_size", 1))


def _has_server(theirs: Theirs) -> bool:
    return bool(theirs("use_vllm", False)) and theirs("vllm_mode", "colocate") == "server"


def _has_node_for_server(theirs: Theirs) -> bool:
    machines = int(theirs("num_machines", 1))
    fits = machines == 1 and _processes(theirs) + _engine(theirs) <= _GPUS_OF_A_NODE
    return _has_server(theirs) and not fits


def _samples_of_update(theirs: Theirs) -> int:
    each = int(theirs("per_device_train_batch_size", 8)) * int(theirs("gradient_accumulation_steps", 1))
    return each * _processes(theirs)


def _samples_of_step(theirs: Theirs) -> int:
    """Return the samples of a step; an update of several generations is one step here."""
    accumulated = int(theirs("gradient_accumulation_steps", 1))
    micro = _samples_of_update(theirs) // accumulated
    given = theirs("generation_batch_size") or micro * int(theirs("steps_per_generation", accumulated))
    return max(int(given), _samples_of_update(theirs))


def _updates_of_step(theirs: Theirs) -> float:
    return _samples_of_step(theirs) / _samples_of_update(theirs) * int(theirs("num_iterations", 1))


def _length(theirs: Theirs) -> int:
    """Return the number of steps of the run. Raises Untranslatable when epochs cannot be counted."""
    if (updates := int(theirs("max_steps", -1))) > 0:
        return ceil(updates / _updates_of_step(theirs))
    number, prompts = float(theirs("num_train_epochs", 3)), prompts_per_step(None, theirs)
    problems = theirs.rows(str(theirs("dataset_name", "")))
    if problems is None or problems < prompts:
        raise Untranslatable("the problems of the run's epochs cannot be counted here")
    return int(number * (problems // prompts))


def _updates_of_run(theirs: Theirs) -> int:
    try:
        return round(_length(theirs) * _updates_of_step(theirs))
    except Untranslatable as error:
        raise Untranslatable(
            "is a matter of the run's updates, which max_steps does not say; give max_steps=N, or set "
            "policy.scheduler.warmup_updates"
        ) from error
