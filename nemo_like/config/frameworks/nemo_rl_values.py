"""What NeMo-RL's tables do to values. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_like.config.frameworks.entries import (
    LEFT_OUT,
    Noted,
    Theirs,
    Untranslatable,
)


def gpus(theirs: Theirs) -> tuple[int, int]:
    """Return how many GPUs train, and how many generate."""
    per_node, nodes = int(theirs("cluster.gpus_per_node", 1)), int(theirs("cluster.num_nodes", 1))
    if theirs("policy.generation.colocated.enabled", True):
        return per_node * nodes, per_node * nodes
    resources = "policy.generation.colocated.resources"
    generating_nodes = int(theirs(f"{resources}.num_nodes", 0) if nodes > 1 else 0)
    generating = generating_nodes * per_node or int(theirs(f"{resources}.gpus_per_node", 0))
    return per_node * nodes - generating, generating


def whole(name: str, gpus: int, each: int, unit: str) -> int:
    if gpus < each or gpus % each:
        raise Untranslatable(f"{gpus} GPUs do not hold whole {unit} of {each}; set {name}")
    return gpus // each


def data_parallel_size(value: Any, theirs: Theirs) -> int:
    is_megatron = theirs("policy.megatron_cfg.enabled", False)
    group = "policy.megatron_cfg" if is_megatron else "policy.dtensor_cfg"
    names = (
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        if is_megatron
        else ("tensor_parallel_size",)
    )
    each = 1
    for name in names:
        each *= int(theirs(f"{group}.{name}", 1))
    return whole("policy.data_parallel_size", gpus(theirs)[0], each, "replicas")


def num_engines(value: Any, theirs: Theirs) -> int:
    each = int(theirs("policy.generation.vllm_cfg.tensor_parallel_size", 1))
    return whole("generation.num_engines", gpus(theirs)[1], each, "engines")


def address(value: Any, theirs: Theirs) -> Any:
    return "auto" if int(value) > 1 else LEFT_OUT


def offloads(value: Any, theirs: Theirs) -> bool:
    """Return whether weights and optimizer make room for the engines."""
    is_on_host = theirs("policy.dtensor_cfg.enabled", False) and theirs("policy.dtensor_cfg.cpu_offload")
    return bool(theirs("policy.generation.colocated.enabled", True) and not is_on_host)


def max_new_tokens(value: Any, theirs: Theirs) -> Any:
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
    return LEFT_OUT if int(value) >= int(theirs("policy.max_total_sequence_length", value)) else value


def only_other_than(key: str) -> Any:
    def convert(value: Any, theirs: Theirs) -> Any:
        return LEFT_OUT if value == theirs(key) else value

    return convert


def updates_per_step(theirs: Theirs) -> int:
    group = "ppo" if theirs("ppo") else "grpo"
    samples = int(theirs(f"{group}.num_prompts_per_step", 1)) * int(
        theirs(f"{group}.num_generations_per_prompt", 1)
    )
    epochs = int(theirs("ppo.ppo_epochs", 1))
    return max(1, samples // int(theirs("policy.train_global_batch_size", samples))) * epochs


def in_updates(value: Any, theirs: Theirs) -> Any:
    return LEFT_OUT if value is None else int(value) * updates_per_step(theirs)


def is_constant(theirs: Theirs) -> bool:
    return bool(theirs("policy.megatron_cfg.scheduler.lr_decay_style", "constant") == "constant")


def min_lr(value: Any, theirs: Theirs) -> Any:
    return LEFT_OUT if is_constant(theirs) else value


def decay_updates(value: Any, theirs: Theirs) -> Any:
    return LEFT_OUT if is_constant(theirs) else in_updates(value, theirs)


def parts(value: Any) -> list[Mapping[str, Any]]:
    return [part for part in value or [] if isinstance(part, Mapping) and "name" in part]


def warmup(value: Any, theirs: Theirs) -> Any:
    first = next(iter(parts(value)), None)
    if first is None or not str(first["name"]).endswith("LinearLR"):
        return 0
    options = first.get("kwargs", {})
    if float(options.get("end_factor", 1.0)) != 1.0:
        raise Untranslatable("only a warm-up to the full rate can be translated; set policy.scheduler")
    updates = int(options.get("total_iters", 0)) * updates_per_step(theirs)
    start = options.get("start_factor", 0.0)
    return Noted(updates, f"the warm-up begins at 0 here, not at {start} of the rate")


def decay(value: Any, theirs: Theirs) -> str:
    last = parts(value)[-1:]
    names = {"LinearLR": "constant", "ConstantLR": "constant"}
    for part in last:
        if (name := str(part["name"]).rpartition(".")[2]) not in names:
            raise Untranslatable(
                f"{name} is not translated; set policy.scheduler.decay_style and decay_updates"
            )
    return "constant"


def target_modules(group: str) -> Any:
    def convert(value: Any, theirs: Theirs) -> Any:
        is_all = not value or theirs(f"{group}.match_all_linear", False)
        return ["all-linear"] if is_all else list(value)

    return convert


def megatron_targets(value: Any, theirs: Theirs) -> list[str]:
    names = {
        "linear_qkv": ("q_proj", "k_proj", "v_proj"),
        "linear_proj": ("o_proj",),
        "linear_fc1": ("gate_proj", "up_proj"),
        "linear_fc2": ("down_proj",),
    }
    if not value:
        return ["all-linear"]
    return [name for module in value for name in names.get(module, (module,))]


def estimator(value: Any, theirs: Theirs) -> str:
    known = {"grpo", "gdpo", "gae", "reinforce_plus_plus"}
    if value not in known:
        raise Untranslatable(
            f"only {', '.join(sorted(known))} can be translated; see docs/rewards.md for yours"
        )
    if value == "reinforce_plus_plus" and theirs("grpo.adv_estimator.minus_baseline", True):
        return "reinforce_plus_plus_baseline"
    return str(value)


def of_grpo(inner: str) -> Any:
    """Return a conversion of a key of the estimator grpo, which the estimator's own group repeats."""

    def convert(value: Any, theirs: Theirs) -> Any:
        if theirs("grpo.adv_estimator.name", "grpo") != "grpo":
            return LEFT_OUT
        return bool(theirs(f"grpo.adv_estimator.{inner}", value))

    return convert


def metric(value: Any, theirs: Theirs) -> Any:
    if value is None:
        return None
    text = str(value)
    for prefix, ours in (("val:", "validation/"), ("train:", "train/")):
        text = text.replace(prefix, ours, 1)
    return text if "/" in text else f"validation/{text}"


def gib(value: Any, theirs: Theirs) -> float:
    return float(int(value) / 2**30)


def mib(value: Any, theirs: Theirs) -> int:
    return int(value) // 2**20


def only_mooncake(convert: Any) -> Any:
    return lambda value, theirs: (
        convert(value, theirs) if theirs("data_plane.backend") == "mooncake_cpu" else LEFT_OUT
    )


def turns(value: Any, theirs: Theirs) -> Any:
    if int(value) == 1:
        return LEFT_OUT
    raise Untranslatable("turns belong to an environment; set env.NAME.max_turns")


def tokenizer(value: Any, theirs: Theirs) -> Any:
    if value is None or value == theirs("policy.model_name"):
        return LEFT_OUT
    raise Untranslatable("a model's tokenizer is in its directory; save the other tokenizer there")
