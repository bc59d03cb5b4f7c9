"""The commands of every part of the check, in the order in which they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu_check_parts.found import is_there
from scripts.gpu_check_parts.settings import ROOT, Settings

_PARTS = ROOT / "scripts" / "gpu_check_parts"
MODEL_CONFIG = _PARTS / "random_model.yaml"
MODEL_STEPS = 10
DEMO_MODEL = ROOT / ".cache" / "models" / "arithmetic-d2-s1"

_GPU_RUN = ("torch", "transformers", "tensordict", "megatron.core", "hydra", "ray", "transfer_queue", "vllm")
# No stage may wait longer than its part, and a failure is to be seen, not recovered from.
_STRICT = [
    "cluster.start_timeout_s=180",
    "cluster.stage_timeout_s=100",
    "cluster.on_stage_timeout=stop",
    "cluster.max_recoveries=0",
    "cluster.max_restarts=0",
    "logger.console=plain",
    "logger.wandb.mode=disabled",
]
_MODEL_ON_CPU = [
    "policy.device=cpu",
    "policy.precision=float32",
    "policy.offload_optimizer_for_logprob=false",
    "policy.offload_parameters_between_phases=false",
    "policy.train_global_batch_size=8",
    "policy.max_total_sequence_length=64",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "generation.max_new_tokens=16",
    "generation.vllm_cfg.kv_cache_gib=0.125",
    "generation.vllm_cfg.enforce_eager=true",
    "cluster.gpus_per_node=0",
    "cluster.placement=separate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One process of a part."""

    what: str  # in reasons, and for its log
    words: Sequence[str]
    deadline_s: float
    run_name: str | None = None  # of a whole run, whose directory is read and during which memory is sampled
    num_steps: int = 0  # of that run
    is_needed: bool = False  # when it fails, the rest of the part cannot run


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the check. ``budget_s`` is what it should take on one H100 or H200, its commands' deadlines
    what it may."""

    name: str
    what: str
    budget_s: int
    needs: tuple[str, ...]  # modules
    commands: Callable[[Settings, str], list[Command]]  # of the model's size, which one part needs
    needs_gpu: bool = False  # whether there is nothing of it on a CPU


def _found(settings: Settings, size: str) -> list[Command]:
    words = [sys.executable, str(_PARTS / "found.py")]
    return [Command(what="found", words=words, deadline_s=120)]


def _tests(
    settings: Settings, name: str, marks: str, deadline_s: float, parallel: Sequence[str] = ()
) -> list[Command]:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    words += [f"--junitxml={junit_path(settings, name)}", *parallel, "tests/gpu"]
    return [Command(what=name, words=words, deadline_s=deadline_s)]


def _kernels(settings: Settings, size: str) -> list[Command]:
    # Most of a test's time is imports, which several processes can do at once.
    parallel = ["--numprocesses=3", "--dist=loadfile"] if is_there("xdist") else []
    return _tests(settings, "kernels", "gpu and not engine and not slow", 300, parallel)


def _engines(settings: Settings, size: str) -> list[Command]:
    # The demo is a whole run already.
    return _tests(settings, "engines", "gpu and engine and not whole_run and not slow", 240)


def _transports(settings: Settings, size: str) -> list[Command]:
    words = [
        sys.executable,
        "scripts/bench/weight_channels.py",
        f"--device={settings.device}",
        "--receivers=1",
    ]
    words += ["--mib=2048", "--tensor-mib=32"] if settings.on_gpu else ["--mib=64", "--rounds=5"]
    return [Command(what="transports", words=words, deadline_s=120)]


def _demo(settings: Settings, size: str) -> list[Command]:
    config = f"configs/grpo_arithmetic_{'gpu' if settings.on_gpu else 'cpu'}.yaml"
    num_steps = settings.demo_steps or 80
    traced = sorted({1, 2, 3, num_steps} & set(range(1, num_steps + 1)))
    overrides = [f"policy.model_name={DEMO_MODEL}", f"grpo.max_num_steps={num_steps}"]
    overrides.append("loss_fn.use_generation_logprobs_as_prev=false")
    prepare = [sys.executable, "scripts/prepare_arithmetic.py", f"--output={DEMO_MODEL}", "--seed=1"]
    return [
        Command(what="the demo's model", words=prepare, deadline_s=150, is_needed=True),
        _run(settings, "demo", config, overrides, num_steps, traced, deadline_s=240),
    ]


def _model(settings: Settings, size: str) -> list[Command]:
    num_steps = MODEL_STEPS if settings.on_gpu else 3
    directory = model_directory(settings)
    make = [sys.executable, str(_PARTS / "random_model.py"), f"--output={directory}", f"--size={size}"]
    make.append(f"--device={settings.device}")
    shared = [
        f"policy.model_name={directory / 'model'}",
        f"data.train.path={directory / 'prompts.jsonl'}",
        f"grpo.max_num_steps={num_steps}",
        *([] if settings.on_gpu else _MODEL_ON_CPU),
    ]
    commands = [Command(what=f"a {size} model", words=make, deadline_s=120, is_needed=True)]
    for transport, overrides in _transports_of_runs(settings).items():
        name = f"model-{transport}"
        more = [*shared, f"generation.weight_transport={transport}", *overrides]
        traced = range(1, num_steps + 1)
        commands.append(_run(settings, name, str(MODEL_CONFIG), more, num_steps, traced, deadline_s=240))
    return commands


def _transports_of_runs(settings: Settings) -> dict[str, list[str]]:
    """Return the overrides by transport, for every transport with which the model runs."""
    if not settings.on_gpu:
        return {"shared_memory": []}
    separate = [
        "cluster.placement=separate",
        "cluster.gpus_per_node=2",
        "policy.offload_optimizer_for_logprob=false",
        "policy.offload_parameters_between_phases=false",
    ]
    return {"cuda_ipc": [], **({"collective": separate} if len(settings.gpus) > 1 else {})}


def _run(
    settings: Settings,
    name: str,
    config: str,
    overrides: Sequence[str],
    num_steps: int,
    traced: Sequence[int],
    *,
    deadline_s: float,
) -> Command:
    run_name = f"{name}-{settings.mark}"
    steps = ",".join(map(str, traced))
    words = [sys.executable, "run_grpo.py", "--config", config, *overrides, *_STRICT]
    words += [
        f"logger.trace_steps=[{steps}]",
        f"logger.log_dir={settings.runs}",
        f"logger.run_name={run_name}",
    ]
    return Command(what=name, words=words, deadline_s=deadline_s, run_name=run_name, num_steps=num_steps)


def junit_path(settings: Settings, name: str) -> Path:
    return settings.output / f"{name}.junit.xml"


def log_path(settings: Settings, command: Command) -> Path:
    return settings.output / f"{command.what.replace(' ', '-').replace(chr(39), '')}.log"


def model_directory(settings: Settings) -> Path:
    """Return where the model with random weights lies while its part runs."""
    return settings.output / "random_model"


_TESTED = ("torch", "transformers", "megatron.core", "ray", "pytest", "pytest_timeout")

PARTS = (
    Part(
        name="found",
        what="versions, GPUs, and whether everything can be imported",
        budget_s=20,
        needs=(),
        commands=_found,
    ),
    Part(
        name="kernels",
        what="policy workers, kernels and transports on one GPU; starts neither Ray nor vLLM",
        budget_s=120,
        needs=_TESTED,
        commands=_kernels,
        needs_gpu=True,
    ),
    Part(
        name="transports",
        what="GB/s of weights between processes",
        budget_s=25,
        needs=("torch",),
        commands=_transports,
    ),
    Part(
        name="demo",
        what="the demo as a whole run, to its accuracy",
        budget_s=110,
        needs=_GPU_RUN,
        commands=_demo,
    ),
    Part(
        name="model",
        what="ten steps of a model with random weights, with every transport that applies",
        budget_s=115,
        needs=_GPU_RUN,
        commands=_model,
    ),
    Part(
        name="engines",
        what="engines on a GPU: weights by CUDA's inter-process memory, sleep and wake, several on one GPU",
        budget_s=85,
        needs=(*_TESTED, "vllm"),
        commands=_engines,
        needs_gpu=True,
    ),
)
