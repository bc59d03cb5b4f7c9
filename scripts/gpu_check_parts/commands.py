"""The commands of every part of the check, in the order in which they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from scripts.gpu_check_parts.found import is_there
from scripts.gpu_check_parts.settings import ROOT, Settings

_PARTS = ROOT / "scripts" / "gpu_check_parts"
MODEL_CONFIG = _PARTS / "random_model.yaml"
MODEL_STEPS = 10
BUCKETS_MIB = (64, 512)
DEMO_MODEL = ROOT / ".cache" / "models" / "arithmetic-d2-s1"

_GPU_RUN = ("torch", "transformers", "tensordict", "megatron.core", "hydra", "ray", "transfer_queue", "vllm")
# Of what a call may take where it may take eight minutes, a part's commands; the rest is for ending them.
PART_LIMIT_S = 420
# No stage may wait longer than its part, and a failure is to be seen, not recovered from.
_STRICT = [
    "cluster.start_timeout_s=260",  # with nothing compiled yet
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


class Prints(Enum):
    """What a command leaves, which its part's result is made of."""

    nothing = "nothing"
    imports = "imports"
    outcomes = "outcomes"  # of tests, in a file
    rates = "rates"  # one JSON object
    costs = "costs"  # a JSON object per line, as soon as it is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One process of a part."""

    what: str  # in reasons, and for its log
    words: Sequence[str]
    deadline_s: float
    prints: Prints = Prints.nothing
    run_name: str | None = None  # of a whole run, whose directory is read and during which memory is sampled
    num_steps: int = 0  # of that run
    is_needed: bool = False  # when it fails, the rest of the part cannot run


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the check. ``budget_s`` is what it should take on one H100 or H200; its commands may take
    what their deadlines say, and PART_LIMIT_S together."""

    name: str
    what: str
    budget_s: int
    needs: tuple[str, ...]  # modules
    commands: Callable[[Settings, str], list[Command]]  # of the model's size
    has_size: bool = False  # whether its model is the largest that fits
    needs_gpu: bool = False  # whether there is nothing of it on a CPU


def _found(settings: Settings, size: str) -> list[Command]:
    words = [sys.executable, str(_PARTS / "found.py")]
    return [Command(what="found", words=words, deadline_s=120, prints=Prints.imports)]


def _tests(
    settings: Settings, name: str, marks: str, deadline_s: float, parallel: Sequence[str] = ()
) -> list[Command]:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    words += ["-p", "scripts.gpu_check_parts.outcomes", f"--outcomes={outcomes_path(settings, name)}"]
    words += [*parallel, "tests/gpu"]
    return [Command(what=name, words=words, deadline_s=deadline_s, prints=Prints.outcomes)]


def _kernels(settings: Settings, size: str) -> list[Command]:
    # Most of a test's time is imports, which several processes can do at once.
    parallel = ["--numprocesses=3", "--dist=loadfile"] if is_there("xdist") else []
    return _tests(settings, "kernels", "gpu and not engine and not slow", PART_LIMIT_S, parallel)


def _engines(settings: Settings, size: str) -> list[Command]:
    # The demo is a whole run already.
    return _tests(settings, "engines", "gpu and engine and not whole_run and not slow", PART_LIMIT_S)


def _drafts(settings: Settings, size: str) -> list[Command]:
    return _tests(settings, "drafts", "gpu and engine and not whole_run and slow", PART_LIMIT_S)


def _costs(what: str, parts: str) -> Callable[[Settings, str], list[Command]]:
    """Return the command of a part that measures some of a policy worker's costs."""

    def commands(settings: Settings, size: str) -> list[Command]:
        words = [sys.executable, "scripts/bench/device_costs.py", f"--device={settings.device}"]
        words += [f"--parts={parts}", f"--size={_smaller(size) if what == 'checkpoint' else size}"]
        words += [] if settings.on_gpu else ["--samples=8", "--tokens=32", "--rounds=1"]
        return [Command(what=what, words=words, deadline_s=PART_LIMIT_S, prints=Prints.costs)]

    return commands


def _smaller(size: str) -> str:
    """Return the size of which a checkpoint is written: all of it also lies in the host's memory."""
    return "0.6B" if size == "1.7B" else size


def _transports(settings: Settings, size: str) -> list[Command]:
    tickets = [sys.executable, str(_PARTS / "tickets.py"), f"--device={settings.device}"]
    words = [
        sys.executable,
        "scripts/bench/weight_channels.py",
        f"--device={settings.device}",
        "--receivers=1",
    ]
    words += ["--mib=2048", "--tensor-mib=32"] if settings.on_gpu else ["--mib=64", "--rounds=5"]
    return [
        Command(what="tickets", words=tickets, deadline_s=120, prints=Prints.costs),
        Command(what="transports", words=words, deadline_s=120, prints=Prints.rates),
    ]


def _demo(settings: Settings, size: str) -> list[Command]:
    config = f"configs/grpo_arithmetic_{'gpu' if settings.on_gpu else 'cpu'}.yaml"
    num_steps = settings.demo_steps or 80
    traced = sorted({1, 2, 3, num_steps} & set(range(1, num_steps + 1)))
    overrides = [f"policy.model_name={DEMO_MODEL}", f"grpo.max_num_steps={num_steps}"]
    overrides.append("loss_fn.use_generation_logprobs_as_prev=false")
    prepare = [sys.executable, "scripts/prepare_arithmetic.py", f"--output={DEMO_MODEL}", "--seed=1"]
    return [
        Command(what="the demo's model", words=prepare, deadline_s=120, is_needed=True),
        _run(settings, "demo", config, overrides, num_steps, traced, deadline_s=PART_LIMIT_S),
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
    for name, overrides in _transports_of_runs(settings).items():
        traced = range(1, num_steps + 1)
        more = [*shared, *overrides]
        run = _run(
            settings, f"model-{name}", str(MODEL_CONFIG), more, num_steps, traced, deadline_s=PART_LIMIT_S
        )
        commands.append(run)
    return commands


def _transports_of_runs(settings: Settings) -> dict[str, list[str]]:
    """Return the overrides of every run of the model, by name: each transport, in buckets of two sizes."""
    if not settings.on_gpu:
        return {"shared_memory": ["generation.weight_transport=shared_memory"]}
    colocated = {
        f"cuda_ipc-{mib}": ["generation.weight_transport=cuda_ipc", f"generation.weight_bucket_mib={mib}"]
        for mib in BUCKETS_MIB
    }
    if len(settings.gpus) < 2:
        return colocated
    separate = [
        "generation.weight_transport=collective",
        f"generation.weight_bucket_mib={BUCKETS_MIB[-1]}",
        "cluster.placement=separate",
        "cluster.gpus_per_node=2",
        "policy.offload_optimizer_for_logprob=false",
        "policy.offload_parameters_between_phases=false",
    ]
    return {**colocated, f"collective-{BUCKETS_MIB[-1]}": separate}


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


def outcomes_path(settings: Settings, name: str) -> Path:
    return settings.output / f"{name}.tests.jsonl"


def log_path(settings: Settings, command: Command) -> Path:
    return settings.output / f"{command.what.replace(' ', '-').replace(chr(39), '')}.log"


def model_directory(settings: Settings) -> Path:
    """Return where the model with random weights lies while its part runs."""
    return settings.output / "random_model"


_TESTED = ("torch", "transformers", "megatron.core", "ray", "pytest", "pytest_timeout")
_TRAINING = ("torch", "transformers", "megatron.core", "hydra", "ray")

# Those without vLLM come first, so that what stops an engine stops nothing else.
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
        name="layers",
        what="a Megatron-core worker's log-probs and training, and how often each layer waits for the GPU",
        budget_s=75,
        needs=_TRAINING,
        commands=_costs("layers", "start,phases,waits"),
        has_size=True,
    ),
    Part(
        name="transports",
        what="memory of one process in another, and GB/s of weights between them",
        budget_s=45,
        needs=("torch",),
        commands=_transports,
    ),
    Part(
        name="offload",
        what="optimizer state and weights to the host and back, by Megatron-core and parked",
        budget_s=75,
        needs=_TRAINING,
        commands=_costs("offload", "host_memory,optimizer,reference"),
        has_size=True,
    ),
    Part(
        name="head",
        what="log-probs with a backward pass, by size of a chunk of logits",
        budget_s=30,
        needs=_TRAINING,
        commands=_costs("head", "head"),
        has_size=True,
    ),
    Part(
        name="checkpoint",
        what="seconds and the host's memory of a checkpoint, written at once and in the background",
        budget_s=75,
        needs=_TRAINING,
        commands=_costs("checkpoint", "checkpoint"),
        has_size=True,
    ),
    Part(
        name="engines",
        what="engines on a GPU: weights by CUDA's inter-process memory, sleep and wake, several on one GPU",
        budget_s=370,
        needs=(*_TESTED, "vllm"),
        commands=_engines,
        needs_gpu=True,
    ),
    Part(
        name="drafts",
        what="engines that draft (speculative decoding) on a GPU: log-probs, seeds, sleep",
        budget_s=180,
        needs=(*_TESTED, "vllm"),
        commands=_drafts,
        needs_gpu=True,
    ),
    Part(
        name="demo",
        what="the demo as a whole run, to its accuracy",
        budget_s=210,
        needs=_GPU_RUN,
        commands=_demo,
    ),
    Part(
        name="model",
        what="ten steps of a model with random weights, with every transport and size of buckets",
        budget_s=190,
        needs=_GPU_RUN,
        commands=_model,
        has_size=True,
    ),
)
