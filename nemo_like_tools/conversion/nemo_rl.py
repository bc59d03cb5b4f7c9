"""Conversions that the table of NeMo-RL names.

With ``group="value"`` a setting of the critic is converted; a setting that the critic's group lacks is taken
from the policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nemo_like.observability.metric_meanings import meaning_of
from nemo_like_tools.conversion.values import (
    LEFT_OUT,
    MEGATRON_LAYERS,
    Noted,
    Theirs,
    Untranslatable,
    excluded,
    path,
)

_ESTIMATORS = ("gae", "gdpo", "grpo", "reinforce_plus_plus")
_CONSTANT_SCHEDULERS = ("LinearLR", "ConstantLR")


def data_parallel_size(value: Any, theirs: Theirs) -> int:
    """Return the number of the policy's replicas on the GPUs that train."""
    is_megatron = theirs("policy.megatron_cfg.enabled", False)
    group = "policy.megatron_cfg" if is_megatron else "policy.dtensor_cfg"
    names = (
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        if is_megatron
        else ("tensor_parallel_size", "context_parallel_size")
    )
    each = 1
    for name in names:
        each *= int(theirs(f"{group}.{name}", 1))
    return _whole("policy.data_parallel_size", _gpus(theirs)[0], each, "replicas")


def num_engines(value: Any, theirs: Theirs) -> int:
    """Return the number of engines on the GPUs that generate."""
    return _whole("generation.num_engines", _gpus(theirs)[1], _engine_gpus(theirs), "engines")


def engine_nodes(value: Any, theirs: Theirs) -> Any:
    """Return the nodes of ``value`` GPUs that an engine takes; nothing for an engine that fits on one."""
    num_nodes = math.ceil(_engine_gpus(theirs) / int(value))
    return num_nodes if num_nodes > 1 else LEFT_OUT


def _engine_gpus(theirs: Theirs) -> int:
    each = int(theirs("policy.generation.vllm_cfg.tensor_parallel_size", 1))
    return each * int(theirs("policy.generation.vllm_cfg.pipeline_parallel_size", 1))


def offloads(value: Any, theirs: Theirs) -> bool:
    """Return whether weights and optimizer leave the GPUs while engines use them."""
    is_on_host = theirs("policy.dtensor_cfg.enabled", False) and theirs("policy.dtensor_cfg.cpu_offload")
    return bool(theirs("policy.generation.colocated.enabled", True) and not is_on_host)


def offloads_optimizer(value: Any, theirs: Theirs) -> bool:
    """Return whether the optimizer leaves the GPUs, which that of Megatron's adapters need not."""
    has_adapters = theirs("policy.megatron_cfg.enabled", False) and theirs("policy.megatron_cfg.peft.enabled")
    return offloads(value, theirs) and not has_adapters


def offloads_too(value: Any, theirs: Theirs, group: str = "policy") -> bool:
    """Return whether the optimizer leaves the GPUs: the value says so, or engines share the GPUs."""
    return bool(value) or offloads_optimizer(value, _with_policy_from(group, theirs))


def max_new_tokens(value: Any, theirs: Theirs) -> Any:
    """Return the limit of a response, chosen so that a prompt fits into the total length beside it."""
    total = int(theirs("policy.max_total_sequence_length", 0))
    if not total or int(value) < total:
        return value
    limit = int(theirs("data.max_input_seq_length", total))
    prompt = limit if limit < total else total // 4
    note = (
        f"a response fills what the prompt leaves of {total} tokens in NeMo-RL; here both have their limit, "
        f"so prompts got {prompt} tokens and responses {total - prompt}"
    )
    return Noted(total - prompt, note)


def max_input(value: Any, theirs: Theirs) -> Any:
    """Return the limit of a prompt, if it is below the total length."""
    return LEFT_OUT if int(value) >= int(theirs("policy.max_total_sequence_length", value)) else value


def staleness(value: Any, theirs: Theirs, group: str) -> int:
    """Return how many steps rollouts run ahead; 0 when they do not."""
    return int(theirs(f"{group}.max_trajectory_age_steps", 1)) if value else 0


def prompts_of_rollouts(value: Any, theirs: Theirs, group: str) -> Any:
    """Return the prompts of one rollout of dynamic sampling; with those of a step nothing asks for it."""
    if value in (None, 1) or not theirs(f"{group}.use_dynamic_sampling", False):
        return LEFT_OUT
    return round(float(value) * int(theirs(f"{group}.num_prompts_per_step", 1)))


def in_updates(value: Any, theirs: Theirs, group: str = "policy") -> Any:
    """Return a number of steps as a number of optimizer updates."""
    return LEFT_OUT if value is None else int(value) * _updates_per_step(_with_policy_from(group, theirs))


def min_lr(value: Any, theirs: Theirs, group: str = "policy") -> Any:
    """Return the lowest learning rate, if the rate decays."""
    return LEFT_OUT if _is_constant(_with_policy_from(group, theirs)) else value


def decay_updates(value: Any, theirs: Theirs, group: str = "policy") -> Any:
    """Return the number of updates of the decay, if the rate decays."""
    return LEFT_OUT if _is_constant(_with_policy_from(group, theirs)) else in_updates(value, theirs, group)


def warmup(value: Any, theirs: Theirs, group: str = "policy") -> Any:
    """Return the number of updates of a warm-up: a LinearLR at the start of the list of schedulers."""
    first = next(iter(_schedulers(value)), None)
    if first is None or not str(first["name"]).endswith("LinearLR"):
        return 0
    options = first.get("kwargs", {})
    if float(options.get("end_factor", 1.0)) != 1.0:
        raise Untranslatable("only a warm-up to the full rate can be translated; set policy.scheduler")
    updates = int(options.get("total_iters", 0)) * _updates_per_step(_with_policy_from(group, theirs))
    start = options.get("start_factor", 0.0)
    return Noted(updates, f"the warm-up begins at 0 here, not at {start} of the rate")


def decay(value: Any, theirs: Theirs) -> str:
    """Return the style of the decay, which is the last of the list of schedulers."""
    for part in _schedulers(value)[-1:]:
        if (name := str(part["name"]).rpartition(".")[2]) not in _CONSTANT_SCHEDULERS:
            raise Untranslatable(
                f"{name} is not translated; set policy.scheduler.decay_style and decay_updates"
            )
    return "constant"


def target_modules(value: Any, theirs: Theirs, group: str) -> list[str]:
    """Return the layers that get adapters, by their names in transformers."""
    is_all = not value or theirs(f"{group}.match_all_linear", False)
    return ["all-linear"] if is_all else list(value)


def megatron_excluded(value: Any, theirs: Theirs) -> list[str]:
    """Return the layers without adapters, from Megatron's names."""
    return [name for module in excluded(value, theirs) for name in MEGATRON_LAYERS.get(module, (module,))]


def estimator(value: Any, theirs: Theirs) -> str:
    """Return the name of an advantage estimator."""
    if value not in _ESTIMATORS:
        raise Untranslatable(
            f"only {', '.join(_ESTIMATORS)} can be translated; see docs/how_to/own_loss.md for yours"
        )
    if value == "reinforce_plus_plus" and theirs("grpo.adv_estimator.minus_baseline", True):
        return "reinforce_plus_plus_baseline"
    return str(value)


def policy_lambda(value: Any, theirs: Theirs) -> Any:
    """Return the policy's lambda where it is their common one, and the critic has its own."""
    group = "ppo.adv_estimator"
    has_own = theirs(f"{group}.gae_lambda_policy") is not None or theirs(f"{group}.length_adaptive_alpha", 0)
    return LEFT_OUT if has_own or theirs(f"{group}.gae_lambda_value") is None else value


def of_grpo(value: Any, theirs: Theirs, setting: str) -> Any:
    """Return a setting of the estimator grpo, in whose group NeMo-RL repeats it."""
    name = theirs("ppo.adv_estimator.name", theirs("grpo.adv_estimator.name", "grpo"))
    if name != "grpo":
        return LEFT_OUT
    return bool(theirs(f"grpo.adv_estimator.{setting}", value))


def no_reward_for(value: Any, theirs: Theirs) -> Any:
    """Return what takes a response its reward."""
    flags = {
        "penalize_duplicated_reasoning": "repeated_thinking",
        "penalize_empty_final_answer": "empty_answer",
        "penalize_malformed_think_tag": "malformed_thinking",
    }
    return [flag for key, flag in flags.items() if theirs(f"reward_penalties.{key}")] or LEFT_OUT


def answer_pattern(value: Any, theirs: Theirs) -> Any:
    """Return where the answer of a response is, which DAPO's comparison looks for and math-verify's does
    not."""
    if value in (None, "hf_math_verify"):
        return LEFT_OUT
    if value != "dapo_math_verify":
        raise Untranslatable(
            f"{value} is no comparison that is known here; env.math compares by math-verify, and for another "
            "one add `- env@env.NAME: KIND` to the defaults"
        )
    note = "math-verify compares what follows the last Answer: by its value, not by its normalised text"
    return Noted(r"(?i)Answer\s*:\s*([^\n]+)", note)


def metric(value: Any, theirs: Theirs) -> str | None:
    """Return the name of a metric; its prefix says whether it is of a step or of a validation."""
    if value is None:
        return None
    text = str(value)
    for prefix, ours in (("val:", "validation/"), ("val_", "validation/"), ("train:", "train/")):
        if text.startswith(prefix):
            text = f"{ours}{text.removeprefix(prefix)}"
    name = text if text.startswith(("validation/", "train/")) else f"validation/{text}"
    if meaning_of(name) is None:
        raise Untranslatable(
            f"there is no metric {name} here; set the key to one of docs/reference/metrics.md, such as "
            "validation/reward"
        )
    return name


def stop_metric(value: Any, theirs: Theirs) -> Any:
    """Return the metric that ends a run."""
    return LEFT_OUT if value is None else metric(value, theirs)


def quantization(value: Any, theirs: Theirs) -> str | None:
    """Return the engine's quantization; null means the policy's precision."""
    return "fp8" if value == "fp8" else None


def fp8_format(value: Any, theirs: Theirs, group: str) -> Any:
    """Return the format in which a worker group's linear layers train, if they do in 8 bits."""
    return theirs(f"{group}.megatron_cfg.fp8_cfg.fp8", "e4m3") if value else LEFT_OUT


def fp8_recipe(value: Any, theirs: Theirs, group: str) -> Any:
    """Return how values of 8 bits are scaled, if a worker group's linear layers train in 8 bits."""
    return value if theirs(f"{group}.megatron_cfg.fp8_cfg.enabled", False) else LEFT_OUT


def gib(value: Any, theirs: Theirs) -> Any:
    """Return a number of bytes in GiB, if Mooncake is used."""
    return float(int(value) / 2**30) if _has_mooncake(theirs) else LEFT_OUT


def mib(value: Any, theirs: Theirs) -> Any:
    """Return a number of bytes in whole MiB, if Mooncake is used."""
    return int(value) // 2**20 if _has_mooncake(theirs) else LEFT_OUT


def turns(value: Any, theirs: Theirs) -> Any:
    """Leave out a single turn; several turns are a setting of an environment here."""
    if int(value) == 1:
        return LEFT_OUT
    raise Untranslatable("turns belong to an environment; set env.NAME.max_turns")


def tokenizer(value: Any, theirs: Theirs) -> Any:
    """Return a tokenizer that is not the model's own."""
    return LEFT_OUT if value is None or value == theirs("policy.model_name") else value


def chat_template(value: Any, theirs: Theirs) -> Any:
    """Return the file of a chat template; the model's own is left out."""
    if value in (None, "default"):
        return LEFT_OUT
    if not str(value).endswith(".jinja"):
        raise Untranslatable("write the template into a file and name it in data.chat_template")
    return path(value, theirs)


def cache_dtype(value: Any, theirs: Theirs) -> Any:
    """Return the type of the engines' cache; the model's own is left out."""
    if value in (None, "auto"):
        return LEFT_OUT
    if theirs("policy.generation.vllm_kwargs"):
        raise Untranslatable("set generation.vllm_kwargs.kv_cache_dtype beside the others")
    return value


def _with_policy_from(group: str, theirs: Theirs) -> Theirs:
    """Return the configuration with the group ``group`` as its policy, completed by the policy's values."""
    if group == "policy":
        return theirs
    tree = {**theirs.tree, "policy": {**theirs("policy", {}), **theirs(group, {})}}
    return Theirs(tree, theirs.texts)


def _gpus(theirs: Theirs) -> tuple[int, int]:
    """Return the number of GPUs that train, and the number of GPUs that generate."""
    per_node, nodes = int(theirs("cluster.gpus_per_node", 1)), int(theirs("cluster.num_nodes", 1))
    if theirs("policy.generation.colocated.enabled", True):
        return per_node * nodes, per_node * nodes
    resources = "policy.generation.colocated.resources"
    generating_nodes = int(theirs(f"{resources}.num_nodes", 0) if nodes > 1 else 0)
    generating = generating_nodes * per_node or int(theirs(f"{resources}.gpus_per_node", 0))
    return per_node * nodes - generating, generating


def _whole(key: str, gpus: int, each: int, unit: str) -> int:
    if gpus < each or gpus % each:
        raise Untranslatable(f"{gpus} GPUs do not hold whole {unit} of {each}; set {key}")
    return gpus // each


def _updates_per_step(theirs: Theirs) -> int:
    group = "ppo" if theirs("ppo") else "grpo"
    prompts, generations = (
        int(theirs(f"{group}.{name}", 1)) for name in ("num_prompts_per_step", "num_generations_per_prompt")
    )
    samples = prompts * generations
    epochs = int(theirs("ppo.ppo_epochs", 1))
    return max(1, samples // int(theirs("policy.train_global_batch_size", samples))) * epochs


def _is_constant(theirs: Theirs) -> bool:
    return bool(theirs("policy.megatron_cfg.scheduler.lr_decay_style", "constant") == "constant")


def _schedulers(value: Any) -> list[Mapping[str, Any]]:
    return [part for part in value or [] if isinstance(part, Mapping) and "name" in part]


def _has_mooncake(theirs: Theirs) -> bool:
    return bool(theirs("data_plane.backend") == "mooncake_cpu")
