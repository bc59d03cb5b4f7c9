"""Rules on the model checkpoint that ``policy.model_name`` names: it exists, is complete and can be divided
over the ranks that the configuration asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from shlex import quote

from nemo_like.config.problems import ConfigError, Problem
from nemo_like.configuration import Config
from nemo_like.data.options import DatasetKind
from nemo_like.models.adapter_layers import ATTENTION_LAYERS, FEED_FORWARD_LAYERS, adapted_layers
from nemo_like.models.end_tokens import EndTokenError, stated_end_ids
from nemo_like.models.model_info import ModelInfo, read_model_info, shipped_shape
from nemo_like.plan.host_memory import host_bytes, host_memory_problems
from nemo_like.plan.memory_timetable import gpu_bytes, memory_problems
from nemo_like.plan.run_models import run_models
from nemo_like.policy.layout import adapters_of, replays_routes, stage_size
from nemo_like.policy.options import Device, PolicyBackend, WorkerGroupConfig
from nemo_like.rollout.tasks import task_environments, training_sampling, validation_sampling
from nemo_like.rules.image_rules import image_problems
from nemo_like.rules.machine_rules import Machine
from nemo_like.rules.placement_rules import placement_problems
from nemo_like.rules.speculation_rules import cache_problems
from nemo_like.rules.weight_rules import mixture_problems

# On the Hugging Face hub, the owner of models whose names begin like this.
_OWNERS = {
    "Qwen": "Qwen",
    "QwQ": "Qwen",
    "Llama": "meta-llama",
    "Meta-Llama": "meta-llama",
    "Mistral": "mistralai",
    "gemma": "google",
    "Phi": "microsoft",
}
# Head sizes for which vLLM has attention on the CPU (CPUAttentionBackend.get_supported_head_sizes).
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def checkpoint_problems(cfg: Config, machine: Machine = Machine.this) -> Iterator[Problem]:
    """Yield every problem with the model checkpoint, or with how the configuration divides it over ranks.

    For a run on another machine the checkpoint need not be here if the sizes of the model are known.
    """
    model = yield from _model("policy", cfg.policy, cfg, machine)
    if model is None:
        return
    yield from image_problems(cfg, model)
    layout_problems = [*_layout("policy", cfg.policy, model), *_engine_layout(cfg, model)]
    yield from layout_problems
    if not layout_problems:
        yield from _memory(cfg)
    yield from _context_length("policy", cfg.policy, model)
    yield from _stop_tokens(cfg, model)


def other_checkpoint_problems(
    name: str, group: WorkerGroupConfig, cfg: Config, machine: Machine = Machine.this
) -> Iterator[Problem]:
    """Yield every problem with the checkpoint of a worker group, called ``name``, beside the policy."""
    model = yield from _model(name, group, cfg, machine)
    if model is not None:
        yield from _layout(name, group, model)
        yield from _context_length(name, group, model)


def _model(
    name: str, group: WorkerGroupConfig, cfg: Config, machine: Machine
) -> Generator[Problem, None, ModelInfo | None]:
    """Yield what is wrong with the directory of a group's checkpoint; return the model, or None where it
    cannot be read."""
    model_name = group.model_name
    key, path = f"{name}.model_name={model_name}", Path(model_name)
    if path.is_dir():
        yield from _missing_files(key, path)
    elif machine is Machine.another and (shape := shipped_shape(model_name)) is not None:
        path = shape
    else:
        yield Problem(key=key, rule="is not a directory", remedy=_how_to_get(cfg, model_name))
        return None
    try:
        stated_end_ids(path)
    except EndTokenError as error:
        remedy = "write the ids of the tokens that end a response there"
        yield Problem(key=key, rule=str(error), remedy=remedy)
    try:
        return read_model_info(str(path), group.backend, name)
    except ConfigError as error:
        yield from error.problems
        return None


def _context_length(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    length = group.max_total_sequence_length
    if length > model.max_position_embeddings:
        yield Problem(
            key=f"{name}.max_total_sequence_length={length}",
            rule=f"must be at most the model's max_position_embeddings={model.max_position_embeddings}",
            remedy="shorten the sequences or use a model with a longer context",
        )


def _stop_tokens(cfg: Config, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem for each setting of stop tokens with one that the model does not have."""
    sourced = [
        resolve(cfg, env)
        for env in task_environments(cfg)
        for resolve in (training_sampling, validation_sampling)
    ]
    wrong = {
        one.keys["stop_token_ids"]: token
        for one in sourced
        for token in one.sampling.stop_token_ids
        if token >= model.vocab_size
    }
    for key, token in wrong.items():
        yield Problem(
            key=key,
            rule=f"has {token}, which is no token of the model: vocab_size={model.vocab_size}",
            remedy="take ids from the checkpoint's tokenizer.json, or name tokens by generation.stop_strings",
        )


def _memory(cfg: Config) -> Iterator[Problem]:
    of_gpu, of_host = gpu_bytes(cfg), host_bytes(cfg)
    if (of_gpu is None and of_host is None) or any(placement_problems(cfg)):
        return
    try:
        models = run_models(cfg)
    except ConfigError:  # told with the rules on critic and teacher
        return
    if of_gpu is not None:
        yield from memory_problems(cfg, models, of_gpu)
    if of_host is not None:
        yield from host_memory_problems(cfg, models, of_host)


def _how_to_get(cfg: Config, name: str) -> str:
    digits = [data.digits for data in cfg.data.train if data.kind is DatasetKind.arithmetic]
    if digits and "arithmetic" in Path(name).name:
        seed = re.search(r"-s(\d+)$", name)
        is_mixture = "-moe-" in Path(name).name
        return (
            f"make it with: .venv/bin/python scripts/prepare_arithmetic.py --output {quote(name)} "
            f"--digits {digits[0]} --seed {seed[1] if seed else cfg.grpo.seed}{' --experts 8' * is_mixture} "
            f"(scripts/demo.sh{' --experts' * is_mixture} does)"
        )
    path = Path(name)
    if path.name.startswith("shapes-s"):
        return "scripts/demo.sh --images makes it, and its pictures"
    if len(path.parts) == 2 and not path.parent.is_dir() and path.parts[0] in _OWNERS.values():
        directory = quote(f"models/{path.name}")
        return f"download it: hf download {quote(name)} --local-dir {directory}, and name that directory"
    owner = next((owner for family, owner in _OWNERS.items() if path.name.startswith(family)), None)
    if owner is None:
        return f"download a model, for example: {_download('OWNER', path)}"
    return f"download it: {_download(owner, path)}"


def _download(owner: str, path: Path) -> str:
    """Return the command that downloads ``path.name`` of an owner into ``path``, for a shell."""
    return f"hf download {quote(f'{owner}/{path.name}')} --local-dir {quote(str(path))}"


def _missing_files(key: str, path: Path) -> Iterator[Problem]:
    if not any(path.glob("*.safetensors")):
        remedy = "save the model with save_pretrained, or download it completely"
        yield Problem(key=key, rule="has no weights (*.safetensors)", remedy=remedy)
    has_vocabulary = any((path / file).is_file() for file in _TOKENIZER_FILES)
    if not has_vocabulary or not (path / "tokenizer_config.json").is_file():
        rule = f"has no tokenizer (tokenizer_config.json and one of {', '.join(_TOKENIZER_FILES)})"
        yield Problem(key=key, rule=rule, remedy="save the tokenizer there with save_pretrained")


def _layout(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    megatron, fsdp = group.megatron_cfg, group.fsdp_cfg
    parts = {"attention heads": model.num_heads, "key-value heads": model.num_kv_heads}
    if model.num_experts is None:
        parts["FFN columns"] = model.intermediate_size
    if group.backend is PolicyBackend.fsdp:
        yield from _must_divide(f"{name}.fsdp_cfg.tensor_parallel_size", fsdp.tensor_parallel_size, parts)
        return
    yield from _must_divide(
        f"{name}.megatron_cfg.tensor_model_parallel_size", megatron.tensor_model_parallel_size, parts
    )
    yield from _must_divide(
        f"{name}.megatron_cfg.pipeline_model_parallel_size",
        megatron.pipeline_model_parallel_size,
        {"layers": model.num_layers},
    )
    yield from _experts(name, group, model)
    yield from _adapted_experts(name, group, model)


def _experts(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    megatron = group.megatron_cfg
    key, ep = f"{name}.megatron_cfg.expert_model_parallel_size", megatron.expert_model_parallel_size
    if model.num_experts is None:
        if ep > 1:
            rule = f"needs a mixture of experts, and this model is of type {model.model_type!r}"
            yield Problem(key=f"{key}={ep}", rule=rule, remedy="set it to 1")
        if megatron.moe_grouped_gemm:
            rule = f"needs a mixture of experts, and this model is of type {model.model_type!r}"
            key = f"{name}.megatron_cfg.moe_grouped_gemm=true"
            yield Problem(key=key, rule=rule, remedy="set it to null")
        if replays_routes(group):
            rule = f"needs a mixture of experts, and this model is of type {model.model_type!r}"
            yield Problem(key=f"{name}.megatron_cfg.router_replay=true", rule=rule, remedy="set it to false")
        return
    yield from _must_divide(key, ep, {"experts": model.num_experts})
    ranks = stage_size(group)
    if ep >= 1 and ranks % ep:
        yield Problem(
            key=f"{key}={ep}",
            rule=f"must divide the TP x CP x DP = {ranks} ranks of a pipeline stage",
            remedy=f"try {_nearest_divisors(ranks, ep)}",
        )
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield Problem(
            key=f"{name}.megatron_cfg.sequence_parallel=false",
            rule="must be true for a mixture of experts with tensor parallelism: else every tensor-parallel "
            "rank would compute every expert on every token",
            remedy="set it to true",
        )


def _adapted_experts(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    lora = adapters_of(group)
    experts = [layer for layer in adapted_layers(lora) if layer in FEED_FORWARD_LAYERS] if lora else []
    if lora and model.num_experts is not None and experts:
        yield Problem(
            key=f"{name}.lora.target_modules=[{', '.join(lora.target_modules)}]",
            rule=f"asks for adapters beside {', '.join(experts)}, which are experts in this mixture and get "
            f"none with {name}.backend=megatron",
            remedy=f"name layers of the attention: [{', '.join(ATTENTION_LAYERS)}]",
        )


def _engine_layout(cfg: Config, model: ModelInfo) -> Iterator[Problem]:
    yield from mixture_problems(cfg, model)
    has_engines = cfg.rollout.replay is None
    if has_engines and cfg.policy.device is Device.cpu and model.head_size not in CPU_HEAD_SIZES:
        yield Problem(
            key=f"policy.model_name={cfg.policy.model_name}",
            rule=f"has attention heads of size {model.head_size}, and vLLM has attention on the CPU only for "
            + ", ".join(map(str, CPU_HEAD_SIZES)),
            remedy="use another model, or policy.device=cuda",
        )
    yield from cache_problems(cfg, model)
    key = "generation.vllm_cfg.tensor_parallel_size"
    tp = cfg.generation.vllm_cfg.tensor_parallel_size
    yield from _must_divide(
        key, tp, {"attention heads": model.num_heads, "FFN columns": model.intermediate_size}
    )
    # vLLM gives every rank a copy of a key-value head when there are fewer heads than ranks.
    if tp >= 1 and model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield Problem(
            key=f"{key}={tp}",
            rule=f"must divide the model's {model.num_kv_heads} key-value heads, or be a multiple of them",
            remedy=f"try {_nearest_divisors(model.num_kv_heads, tp)}",
        )


def _must_divide(key: str, size: int, parts: dict[str, int]) -> Iterator[Problem]:
    uneven = [f"{count} {name}" for name, count in parts.items() if size >= 1 and count % size]
    if uneven:
        yield Problem(
            key=f"{key}={size}",
            rule=f"must divide the model's {' and its '.join(uneven)}",
            remedy=f"try {_nearest_divisors(math.gcd(*parts.values()), size)}",
        )


def _nearest_divisors(count: int, size: int) -> str:
    """Return the divisors of ``count`` next to ``size`` on either side, as "4 or 8"."""
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    below = [number for number in divisors if number < size]
    above = [number for number in divisors if number > size]
    return " or ".join(str(number) for number in below[-1:] + above[:1])
