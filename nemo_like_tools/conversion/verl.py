"""Converts the values of verl's keys.

Each function is named in ``config/frameworks/verl.yaml`` beside the keys that it converts."""

from __future__ import annotations

from math import ceil
from pathlib import PurePath
from typing import Any

from nemo_like_tools.conversion.values import (
    LEFT_OUT,
    UNLIMITED_STEPS,
    Noted,
    Theirs,
    Untranslatable,
    above_zero,
    megatron_targets,
    model_directory,
    one_of,
    path,
)

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_DIVISIONS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_KL_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_KL_KINDS |= {f"{name}+": kind for name, kind in _KL_KINDS.items()}
_BY_SAMPLE = ("gspo", "sapo")  # losses that verl averages per sample, whatever loss_agg_mode says
_ANSWER = "reward_model.ground_truth"  # where verl's files have the reference answer
_WHITENING = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_REWARD = "rewards come from environments; choose one of configs/env, see docs/how_to/environments.md"


def data_parallel_size(value: Any, theirs: Theirs) -> int:
    """Return the number of the policy's replicas on the run's GPUs."""
    each = 1
    if theirs(f"{_ACTOR}.strategy", "fsdp") == "megatron":
        for name in _DIVISIONS:
            each *= int(theirs(f"{_ACTOR}.megatron.{name}", 1))
    else:
        each = _contexts(theirs, _ACTOR)
    return _whole(theirs, each, "replicas")


def contexts(value: Any, theirs: Theirs, group: str) -> Any:
    """Return the ranks over which FSDP divides a row; nothing for another backend."""
    return LEFT_OUT if theirs(f"{group}.strategy", "fsdp") == "megatron" else _contexts(theirs, group)


def expert_parts(value: Any, theirs: Theirs, group: str) -> Any:
    """Return the ranks that share an expert; null is Megatron-core's default, the tensor-parallel ranks."""
    is_mixture = int(theirs(f"{group}.megatron.expert_model_parallel_size", 1)) > 1
    if value is None:
        return int(theirs(f"{group}.megatron.tensor_model_parallel_size", 1)) if is_mixture else LEFT_OUT
    return int(value)


def num_engines(value: Any, theirs: Theirs) -> int:
    """Return the number of engines on the run's GPUs."""
    stages = int(theirs(f"{_ROLLOUT}.pipeline_model_parallel_size", 1))
    return _whole(theirs, stages * int(theirs(f"{_ROLLOUT}.tensor_model_parallel_size", 2)), "engines")


def samples(value: Any, theirs: Theirs) -> int:
    """Return the number of samples that a number of prompts makes."""
    return int(value) * int(theirs(f"{_ROLLOUT}.n", 1))


def per_gpu(value: Any, theirs: Theirs) -> Any:
    """Return a number of samples over all GPUs as a number per replica."""
    return LEFT_OUT if value is None else max(1, int(value) // data_parallel_size(None, theirs))


def recomputes(value: Any, theirs: Theirs, strategy: str = f"{_ACTOR}.strategy") -> Any:
    """Return whether layers are recomputed; this key says so only for the backend fsdp."""
    return LEFT_OUT if theirs(strategy) == "megatron" else bool(value)


def clip_of_megatron(value: Any, theirs: Theirs, strategy: str = f"{_ACTOR}.strategy") -> Any:
    """Return the limit of the gradient's norm, which this key has only for the backend megatron."""
    return value if theirs(strategy) == "megatron" else LEFT_OUT


def sequence_parallel(value: Any, theirs: Theirs, megatron: str) -> bool:
    """Return whether sequences are divided along with the tensors."""
    return bool(value) and int(theirs(f"{megatron}.tensor_model_parallel_size", 1)) > 1


def warmup(value: Any, theirs: Theirs, group: str) -> int:
    """Return the number of updates of a warm-up, given in steps or as a share of the run's steps."""
    steps = int(theirs(f"{group}.lr_warmup_steps", -1))
    if steps <= 0 and (ratio := float(theirs(f"{group}.lr_warmup_steps_ratio", 0.0))):
        total = theirs("trainer.total_training_steps")
        if total is None:
            raise Untranslatable(
                "is a share of the run's steps, which trainer.total_training_steps does not say; set "
                "policy.scheduler.warmup_updates"
            )
        steps = int(ratio * int(total))
    return max(0, steps) * _updates_per_step(theirs)


def decay_updates(value: Any, theirs: Theirs, group: str) -> Any:
    """Return the number of updates of the decay, which by default lasts to the end of the run."""
    if not _is_decaying(group, theirs):
        return LEFT_OUT
    steps = theirs(f"{group}.lr_decay_steps") or theirs("trainer.total_training_steps")
    return LEFT_OUT if steps is None else int(steps) * _updates_per_step(theirs)


def min_lr(value: Any, theirs: Theirs, group: str) -> Any:
    """Return the lowest learning rate, if the rate decays."""
    return value if _is_decaying(group, theirs) else LEFT_OUT


def min_lr_ratio(value: Any, theirs: Theirs, group: str) -> Any:
    """Return the lowest learning rate, which verl gives as a share of the highest, if the rate decays."""
    if not _is_decaying(group, theirs):
        return LEFT_OUT
    return float(value or 0.0) * float(theirs(f"{group}.lr", 1e-6))


def tokens(value: Any, theirs: Theirs, key: str) -> Any:
    """Return a micro-batch's number of tokens, with packing; it holds at least one sample."""
    if not theirs(key, False):
        return LEFT_OUT
    longest = total_length(value, theirs)
    if int(value) >= longest:
        return value
    return Noted(
        longest, f"a micro-batch holds a whole sample of {longest} tokens, which nothing divides here"
    )


def on_gpus(value: Any, theirs: Theirs) -> bool:
    """Return whether something leaves the GPUs between phases; what offload_policy keeps out is not there."""
    return bool(value) and not theirs(f"{_ACTOR}.fsdp_config.offload_policy", False)


def total_length(value: Any, theirs: Theirs) -> int:
    """Return the limit on the length of prompt and response together."""
    return int(theirs("data.max_prompt_length", 512)) + int(theirs("data.max_response_length", 512))


def clip_low(value: Any, theirs: Theirs) -> Any:
    """Return how far below 1 the ratio is clipped."""
    if value is None or float(value) < 1:
        return LEFT_OUT if value is None else value
    return Noted(0.999, f"a ratio is above 0, so {value} is no lower bound; 0.999 is next to none")


def dual_clip(value: Any, theirs: Theirs) -> Any:
    """Return the bound on the loss for negative advantages, if the loss is vanilla."""
    return value if theirs(f"{_ACTOR}.policy_loss.loss_mode", "vanilla") == "vanilla" else LEFT_OUT


def token_level(value: Any, theirs: Theirs) -> bool:
    """Return whether the loss is a mean over tokens rather than over samples."""
    if theirs(f"{_ACTOR}.policy_loss.loss_mode") in _BY_SAMPLE:
        return False
    kinds = {"token-mean": True, "seq-mean-token-mean": False, "seq-mean-token-sum": False}
    kinds["seq-mean-token-sum-norm"] = False
    return bool(one_of(value, theirs, kinds, "set loss_fn.token_level_loss"))


def normalizer(value: Any, theirs: Theirs) -> Any:
    """Return the number by which the sum over a sample's tokens is divided."""
    if theirs(f"{_ACTOR}.policy_loss.loss_mode") in _BY_SAMPLE:
        return LEFT_OUT
    if value == "seq-mean-token-sum-norm":
        return int(theirs(f"{_ACTOR}.loss_scale_factor", theirs("data.max_response_length", 512)))
    return 1 if value == "seq-mean-token-sum" else LEFT_OUT


def tau(value: Any, theirs: Theirs, name: str) -> Any:
    """Return a temperature of the loss sapo, if it is chosen."""
    if theirs(f"{_ACTOR}.policy_loss.loss_mode") != "sapo":
        return LEFT_OUT
    return theirs(f"{_ACTOR}.policy_loss.{name}", value)


def entropy(value: Any, theirs: Theirs) -> Any:
    """Return the coefficient of the entropy.

    0 becomes null, with which the entropy is not computed, unless it is to be reported.
    """
    return value if value or theirs(f"{_ACTOR}.calculate_entropy", False) else None


def kl_penalty(value: Any, theirs: Theirs) -> Any:
    """Return the coefficient of the KL penalty, in the loss or in the reward."""
    in_loss, in_reward = theirs(f"{_ACTOR}.use_kl_loss", False), theirs("algorithm.use_kl_in_reward", False)
    if in_loss and in_reward:
        raise Untranslatable("the KL is in the loss or in the reward, not in both; set one of them to false")
    if in_loss:
        return theirs(f"{_ACTOR}.kl_loss_coef", 0.001)
    if not in_reward:
        return 0.0
    estimator = theirs("algorithm.adv_estimator", "gae")
    if estimator not in _WHITENING:
        raise Untranslatable(
            f"the KL is not in the reward with algorithm.adv_estimator={estimator}; put it into the loss "
            "with loss_fn.reference_policy_kl_penalty"
        )
    return theirs("algorithm.kl_ctrl.kl_coef", 0.001)


def kl_in_reward(value: Any, theirs: Theirs) -> bool:
    """Return whether the KL penalty is in the reward."""
    return bool(value) and kl_penalty(value, theirs) != 0.0


def kl_kind(value: Any, theirs: Theirs, key: str) -> Any:
    """Return the estimator of the KL, if another key of their configuration is true."""
    if not theirs(key, False):
        return LEFT_OUT
    return one_of(value, theirs, _KL_KINDS, "set loss_fn.reference_policy_kl_type=k3")


def is_corrected(value: Any, theirs: Theirs) -> Any:
    """Return whether the loss is weighted by the ratio to the engine's log-probs."""
    if value is None:
        return False
    if value == "sequence" and theirs(f"{_ACTOR}.policy_loss.loss_mode") != "gspo":
        raise Untranslatable("weights are per token; set loss_fn.use_importance_sampling_correction=true")
    return True


def bounds(value: Any, theirs: Theirs, part: str) -> Any:
    """Return the type, the low or the high bound of the importance-sampling weights, as ``part`` says.

    One number clamps the weights; with two, LOW_HIGH, a weight outside of them becomes 0.
    """
    if theirs("algorithm.rollout_correction.rollout_is") is None:
        return LEFT_OUT
    low, _, high = str(value).rpartition("_")
    if part == "type":
        return "icepop" if low else "tis"
    if part == "low":
        return float(low) if low else LEFT_OUT
    return float(high)


def files(value: Any, theirs: Theirs, limit: str | None = None) -> Any:
    """Return the sources of one file or several. Files with equal names are named by their folders. The key
    ``limit`` has the number of rows of one file that are read."""
    if value is None:
        raise Untranslatable("there is no file; set its path")
    names = _names(value)
    stems = [PurePath(name).stem for name in names]
    sources: list[dict[str, Any]] = []
    for file, stem in zip(names, stems, strict=True):
        name = {"name": PurePath(file).parent.name} if stems.count(stem) > 1 else {}
        is_json = PurePath(file).suffix in (".jsonl", ".json")
        reader = {"kind": "jsonl"} if is_json else {"kind": "huggingface", "split": "train"}
        if limit is not None and len(names) == 1 and (rows := int(theirs(limit, -1))) > 0:
            reader["split"] = f"train[:{rows}]"
        keys = {"prompt_key": str(theirs("data.prompt_key", "prompt")), "answer_key": _ANSWER}
        sources.append({**name, **reader, "path": path(file, theirs), **keys})
    return sources if len(sources) > 1 else sources[0]


def first_rows(value: Any, theirs: Theirs) -> Any:
    """Leave the number of rows to the conversion of the files. Raises Untranslatable for several files."""
    if int(value or -1) > 0 and len(_names(theirs("data.train_files", []))) > 1:
        raise Untranslatable("of several files each has rows of its own; set data.train[].split of each")
    return LEFT_OUT


def images(value: Any, theirs: Theirs) -> Any:
    """Return the field with images, which verl names for every model, if the model's name has VL."""
    is_seeing = "vl" in PurePath(str(theirs(f"{_MODEL}.path", ""))).name.lower()
    return str(value) if is_seeing and value is not None else LEFT_OUT


def no_limit(value: Any, theirs: Theirs) -> Any:
    """Return more steps than any number of epochs has, where no number of steps is given."""
    return LEFT_OUT if theirs("trainer.total_training_steps") is not None else UNLIMITED_STEPS


def loaded_parts(value: Any, theirs: Theirs) -> Any:
    """Return which parts of another run's checkpoint are taken, where one is named."""
    if theirs("trainer.resume_from_path") is None:
        return LEFT_OUT
    parts = {
        "model": "weights",
        "model, optimizer": "weights_and_optimizer",
        "extra, model, optimizer": "all",
    }
    if (given := ", ".join(sorted(set(value) - {"hf_model"}))) not in parts:
        raise Untranslatable(f"only {'; '.join(parts)} can be translated; set checkpointing.resume_parts")
    return parts[given]


def in_validation(value: Any, theirs: Theirs, name: str) -> Any:
    """Return a setting of validation, which is greedy without do_sample."""
    is_greedy = not theirs(f"{_ROLLOUT}.val_kwargs.do_sample", False)
    if name == "temperature":
        return 0.0 if is_greedy else value
    if is_greedy or value == theirs(f"{_ROLLOUT}.{name}"):
        return LEFT_OUT
    return 0 if name == "top_k" and int(value) < 1 else value


def truncation(value: Any, theirs: Theirs) -> Any:
    """Leave out the truncation "error", which refuses longer prompts; other kinds cannot be converted."""
    if value == "error":
        return LEFT_OUT
    raise Untranslatable("a prompt that is too long is left out, not cut")


def with_adapters(value: Any, theirs: Theirs, group: str = _MODEL) -> Any:
    """Return a setting of adapters, if there are adapters."""
    return value if _has_adapters(theirs, group) else LEFT_OUT


def targets(value: Any, theirs: Theirs, group: str = _MODEL) -> Any:
    """Return the layers that get adapters, if there are adapters."""
    if not _has_adapters(theirs, group):
        return LEFT_OUT
    return [value] if isinstance(value, str) else list(value)


def gen_batch_size(value: Any, theirs: Theirs) -> Any:
    """Return the prompts of one rollout of dynamic sampling; null and those of a step ask for nothing."""
    is_on = theirs("algorithm.filter_groups.enable", False)
    return LEFT_OUT if not is_on or value in (None, theirs("data.train_batch_size")) else int(value)


def with_megatron_adapters_on(value: Any, theirs: Theirs) -> Any:
    """Return true where Megatron's adapters have a rank; nothing says so else."""
    return True if above_zero(value, theirs) else LEFT_OUT


def with_megatron_adapters(value: Any, theirs: Theirs) -> Any:
    """Return a setting of Megatron's adapters, if there are some."""
    return value if above_zero(theirs(f"{_MODEL}.lora.rank", 0), theirs) else LEFT_OUT


def megatron_targets_of_adapters(value: Any, theirs: Theirs) -> Any:
    """Return the layers that get Megatron's adapters, by their names in transformers."""
    return megatron_targets(value, theirs) if with_megatron_adapters(True, theirs) is True else LEFT_OUT


def overlong(value: Any, theirs: Theirs) -> Any:
    """Return a setting of the penalty for long responses, if the penalty is on."""
    group = "reward_model.reward_kwargs", "reward.reward_kwargs"
    is_on = any(theirs(f"{each}.overlong_buffer_cfg.enable", False) for each in group)
    return value if is_on else LEFT_OUT


def reward_manager(value: Any, theirs: Theirs) -> Any:
    """Leave out the reward managers whose work environments do here; others cannot be converted."""
    if value in (None, "naive", "dapo"):
        return LEFT_OUT
    raise Untranslatable(_REWARD)


def judge(value: Any, theirs: Theirs, then: str) -> Any:
    """Return ``then`` where a reward model judges.

    Raises Untranslatable beside a function, which may ask the model.
    """
    if not value:
        return LEFT_OUT
    if any(theirs(f"{group}custom_reward_function.path") for group in ("", "reward.")):
        raise Untranslatable("choose `- env@env.NAME: reward_model`, see docs/how_to/reward_models.md")
    return then


def judge_model(value: Any, theirs: Theirs, group: str) -> Any:
    """Return the directory of the reward model, where it alone judges."""
    is_alone = not any(theirs(f"{each}custom_reward_function.path") for each in ("", "reward."))
    return model_directory(value, theirs) if value and theirs(f"{group}.enable") and is_alone else LEFT_OUT


def own_tokenizer(value: Any, theirs: Theirs) -> Any:
    """Return a tokenizer that is not the model's own."""
    return LEFT_OUT if value is None or value == theirs(f"{_MODEL}.path") else path(value, theirs)


def overrides(value: Any, theirs: Theirs) -> Any:
    """Return the entries that replace those of config.json, which Megatron has below ``model_config``."""
    given = dict(value or {})
    given |= dict(given.pop("model_config", None) or {})
    if "moe_config" in given:
        raise Untranslatable("moe_config freezes routers, and a mixture's routers train; leave it out")
    return given or LEFT_OUT


def trusted(value: Any, theirs: Theirs) -> bool:
    """Return whether code of any checkpoint may run."""
    return any(theirs(f"{group}.trust_remote_code", False) for group in ("data", *_models(theirs)))


def external_libs(value: Any, theirs: Theirs) -> list[str]:
    """Return the modules that are imported for any model."""
    named = [_names(theirs(f"{group}.external_lib") or []) for group in _models(theirs)]
    return list(dict.fromkeys(name for names in named for name in names))


def of_file(value: Any, theirs: Theirs, then: str) -> Any:
    """Return ``then`` where a file is named."""
    return then if value else LEFT_OUT


def own_reward(value: Any, theirs: Theirs) -> Any:
    """Return the import path of the function in the file ``value``."""
    if not value:
        return LEFT_OUT
    file, groups = PurePath(str(value)), ("reward.custom_reward_function", "custom_reward_function")
    name = next((theirs(f"{group}.name") for group in groups if theirs(f"{group}.path")), None)
    note = f"{file.name} is looked for beside the configuration and in the folders of PYTHONPATH"
    return Noted(f"{file.stem}:{name or 'compute_score'}", note)


def own_arguments(value: Any, theirs: Theirs, group: str) -> Any:
    """Return the arguments of a function, where its file is named."""
    return dict(value) if value and theirs(f"{group}.path") else LEFT_OUT


def _contexts(theirs: Theirs, group: str) -> int:
    """Return the greater of two keys, of which verl deprecated one."""
    name, part = "ulysses_sequence_parallel_size", "fsdp_config" if group == _ACTOR else "fsdp"
    return max(int(theirs(f"{group}.{name}", 1)), int(theirs(f"{group}.{part}.{name}", 1)))


def _models(theirs: Theirs) -> list[str]:
    """Return their groups of the models that a run has."""
    return [_MODEL, *(["critic.model"] if theirs("algorithm.adv_estimator") == "gae" else [])]


def _names(value: Any) -> list[str]:
    """Return the names of one file or module, or of several."""
    return [str(each) for each in ([value] if isinstance(value, str) else value)]


def _whole(theirs: Theirs, each: int, unit: str) -> int:
    gpus = int(theirs("trainer.n_gpus_per_node", 8)) * int(theirs("trainer.nnodes", 1))
    if gpus % each:
        raise Untranslatable(f"{gpus} GPUs do not hold whole {unit} of {each}")
    return gpus // each


def _updates_per_step(theirs: Theirs) -> int:
    prompts = int(theirs("data.train_batch_size", 1024))
    mini = int(theirs(f"{_ACTOR}.ppo_mini_batch_size", 256))
    return ceil(prompts / mini) * int(theirs(f"{_ACTOR}.ppo_epochs", 1))


def _is_decaying(group: str, theirs: Theirs) -> bool:
    names = ("lr_decay_style", "lr_scheduler_type")
    return any(theirs(f"{group}.{name}", "constant") != "constant" for name in names)


def _has_adapters(theirs: Theirs, group: str = _MODEL) -> bool:
    return bool(int(theirs(f"{group}.lora_rank", 0) or 0))


def compared_part(value: Any, theirs: Theirs) -> Any:
    """Return the part of the reward by which groups are compared; null for what is all of it here."""
    return None if value in ("acc", "score", "seq_reward", "seq_final_reward") else value
