"""The group value: when it is there, what it has from the policy, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.config.loader import to_yaml
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config, load_sweep
from nemo_like.plan.machine_rules import Machine
from nemo_like.rules.rules import validate
from tests.unit.config.checkpoints import DEMO, PADDED, REPOSITORY, SCORED, write_checkpoint

Demo = Callable[..., Config]
PPO = REPOSITORY / "configs" / "ppo_arithmetic_cpu.yaml"
CRITIC = ("value=default", "grpo.adv_estimator.name=gae", "grpo.skip_idle_samples=false")
APART = "value.sequence_packing.share_prompts=false"


@pytest.fixture(scope="module")
def resolved_ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with a critic in one file, whose keys no longer follow those of the policy."""
    path = tmp_path_factory.mktemp("configs") / "ppo.yaml"
    path.write_text(to_yaml(load_config(DEMO, CRITIC)))
    return path


@pytest.fixture
def ppo(resolved_ppo: Path, checkpoint: Path, tmp_path: Path) -> Demo:
    """``ppo("value.gae_gamma=0.9")``: PPO on a checkpoint that is there; keys of the policy alone change."""
    there = [f"policy.model_name={checkpoint}", f"value.model_name={checkpoint}"]
    settings = [f"logger.log_dir={tmp_path / 'runs'}", "value.scheduler.decay_style=constant"]
    return lambda *overrides: load_config(resolved_ppo, [*there, *settings, *overrides])


def problems(cfg: Config, machine: Machine = Machine.this) -> list[str]:
    try:
        validate(cfg, machine)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def refused(*overrides: str, path: Path = PPO) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    (problem,) = caught.value.problems
    return str(problem)


# Loading


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(REPOSITORY.glob("configs/*.yaml")) if path != PPO]
    + sorted(REPOSITORY.glob("recipes/*.yaml")),
    ids=lambda path: path.stem,
)
def test_what_names_no_critic_has_none(path: Path) -> None:
    cfg = load_config(path, ["++policy.model_name=somewhere"])
    assert cfg.value is None
    assert "\nvalue: null\n" in to_yaml(cfg)


def test_the_command_line_adds_a_critic_whose_keys_follow_the_policys() -> None:
    cfg = load_config(DEMO, ["value=default", "policy.megatron_cfg.tensor_model_parallel_size=2"])
    value = cfg.value
    assert value is not None
    own = ("num_epochs_per_rollout", "warmup_steps", "clip_range", "gae_gamma", "gae_lambda")
    assert [getattr(value, name) for name in own] == [1, 0, 0.2, 1.0, 0.95]
    assert not value.bootstrap_truncated
    assert value.megatron_cfg == cfg.policy.megatron_cfg
    assert value.megatron_cfg.tensor_model_parallel_size == 2
    assert value.optimizer == replace(cfg.policy.optimizer, lr=1e-5)
    for name in (
        "model_name",
        "backend",
        "train_global_batch_size",
        "sequence_packing",
        "scheduler",
        "fsdp_cfg",
    ):
        assert getattr(value, name) == getattr(cfg.policy, name)


def test_the_critics_own_keys_win_over_the_policys() -> None:
    layout = "megatron_cfg.tensor_model_parallel_size"
    cfg = load_config(PPO, [f"policy.{layout}=2", f"value.{layout}=1", "value.optimizer.lr=0.5"])
    assert cfg.value is not None
    assert cfg.policy.megatron_cfg.tensor_model_parallel_size == 2
    assert cfg.value.megatron_cfg.tensor_model_parallel_size == 1
    assert cfg.value.optimizer.lr == 0.5


def test_adapters_and_replayed_routers_of_the_policy_are_not_the_critics() -> None:
    cfg = load_config(PPO, ["policy.lora.enabled=true", "policy.megatron_cfg.router_replay=true"])
    assert cfg.value is not None
    assert not cfg.value.lora.enabled and not cfg.value.megatron_cfg.router_replay


def test_a_configuration_with_a_critic_survives_being_written_and_read(resolved_ppo: Path) -> None:
    written = load_config(resolved_ppo)
    assert written == load_config(DEMO, CRITIC)
    assert written.value is not None and written.value.clip_range == 0.2
    free = load_config(resolved_ppo, ["~value.clip_range"])
    assert free.value is not None and free.value.clip_range is None


@pytest.mark.parametrize("argument", ["~value", "value=null", "++value=null"])
def test_an_argument_leaves_the_critic_out(argument: str, resolved_ppo: Path) -> None:
    for path in (PPO, resolved_ppo, DEMO):
        assert load_config(path, [argument]).value is None
    # A file that has both the default and keys of its own.
    assert load_config(PPO, ["value=default", argument]).value is None


def test_a_critic_that_was_left_out_in_writing_can_be_added(resolved_demo: Path) -> None:
    assert "value: null" in resolved_demo.read_text()
    assert load_config(resolved_demo, ["value=default"]).value is not None


def test_a_sweep_leaves_a_chosen_critic_out_and_cannot_remove_a_files_own(resolved_ppo: Path) -> None:
    runs = ["grpo.seed=1,2", "~value"]
    assert "~value" in load_sweep(PPO, runs).arguments
    with pytest.raises(
        ConfigError, match="value cannot be removed in a sweep, since the file itself has its"
    ):
        load_sweep(resolved_ppo, runs)


def test_single_keys_without_the_group_are_one_problem_with_its_remedy() -> None:
    told = refused("value.optimizer.lr=1e-3", path=DEMO)
    assert told.startswith(
        f"{DEMO}: value has no value.model_name, value.model_overrides, value.backend and "
    )
    assert told.endswith(f"add `- value: default` to the defaults in {DEMO}, or value=default")


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("value.clip_rang=1", "did you mean value.clip_range?"),
        ("value.gae_lamda=1", "did you mean value.gae_lambda?"),
        ("value.optimizer.lrr=1", "did you mean value.optimizer.lr?"),
        ("value.gamma=1", "did you mean value.gae_gamma?"),
        ("valu=default", "did you mean value?"),
    ],
)
def test_a_typing_error_is_told_with_the_critics_key(argument: str, meant: str) -> None:
    assert refused(argument).endswith(f"is not a key of the configuration; {meant}")


def test_only_what_may_be_null_can_be_removed() -> None:
    assert "value.optimizer must have a value and cannot be removed" in refused("~value.optimizer")
    assert "value=nope must be a configuration of the group value; there are default" in refused("value=nope")
    assert "takes one value here, not a sweep" in refused("value=null,default")


# Rules


def test_ppo_is_valid(ppo: Demo) -> None:
    assert problems(ppo()) == []


def test_the_estimator_and_its_critic_need_each_other(demo: Demo) -> None:
    assert problems(demo(*CRITIC[1:])) == [
        "grpo.adv_estimator.name=gae needs a critic, whose values the advantages come from; add `- value: "
        "default` to the defaults, or value=default to the command line"
    ]
    assert problems(demo("value=default", "grpo.skip_idle_samples=false")) == [
        "value is a critic, whose values are not for grpo.adv_estimator.name=grpo; set "
        "grpo.adv_estimator.name=gae, or leave the group value out"
    ]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["grpo.skip_idle_samples=true"],
            "grpo.skip_idle_samples=true does not go with grpo.adv_estimator.name=gae: every token has an "
            "advantage of its own; set it to false",
        ),
        (
            ["grpo.advantage_clip_high=5"],
            "grpo.advantage_clip_high=5 clips a sample's advantage, and with grpo.adv_estimator.name=gae "
            "each token has its own; set it to null",
        ),
        (
            ["value.gae_lambda_policy=0.9", "value.gae_length_adaptive_alpha=0.05"],
            "value.gae_lambda_policy=0.9 has no effect with value.gae_length_adaptive_alpha=0.05, which "
            "gives each sample its own lambda; set one of them to null",
        ),
        (
            ["value.freeze_vision_tower=true"],
            "value.freeze_vision_tower=true freezes nothing: a critic's model reads no images; set it to "
            "false",
        ),
        (
            ["value.max_total_sequence_length=16"],
            "value.max_total_sequence_length=16 must be that of the policy, 32; leave it out",
        ),
        (
            ["value.device=cuda", "policy.backend=fsdp", "value.backend=fsdp", APART],
            "value.device=cuda must be that of the policy, cpu; leave it out",
        ),
        (
            ["value.warmup_steps=80"],
            "value.warmup_steps=80 must be below grpo.max_num_steps=80, or the policy never trains; try 8",
        ),
        (
            ["value.train_global_batch_size=7"],
            "value.train_global_batch_size=7 must divide the N = 128 prompts x 8 generations = 1024 "
            "samples of a step and be a multiple of value.data_parallel_size=2; try 4 or 8",
        ),
        (
            ["value.sequence_packing.train_mb_tokens=16"],
            "value.sequence_packing.train_mb_tokens=16 must hold a sample of "
            "value.max_total_sequence_length=32 tokens; try 32 or more",
        ),
        (
            ["value.dynamic_batching.enabled=true"],
            "value.dynamic_batching.enabled=true excludes value.sequence_packing.enabled=true: both say "
            "how micro-batches are made; set one of them to false; packing wastes the least",
        ),
        (
            ["value.megatron_cfg.sequence_parallel=true"],
            "value.megatron_cfg.sequence_parallel=true needs value.megatron_cfg.tensor_model_parallel_size "
            "above 1; set it to false",
        ),
        (
            ["value.megatron_cfg.tensor_model_parallel_size=3"],
            "value.megatron_cfg.tensor_model_parallel_size=3 must divide the model's 4 attention heads and "
            "its 2 key-value heads; try 2",
        ),
        (
            ["value.megatron_cfg.pipeline_model_parallel_size=3"],
            "value.megatron_cfg.pipeline_model_parallel_size=3 must divide the model's 2 layers; try 2",
        ),
        (
            ["value.megatron_cfg.expert_model_parallel_size=2"],
            "value.megatron_cfg.expert_model_parallel_size=2 needs a mixture of experts, and this model is "
            "of type 'qwen3'; set it to 1",
        ),
        (
            ["value.fsdp_cfg.tensor_parallel_size=2"],
            "value.fsdp_cfg.tensor_parallel_size=2 is for value.backend=fsdp, but that is megatron; set it "
            "to 1, or value.backend=fsdp",
        ),
        (
            ["value.offload_parameters_between_phases=true"],
            "value.offload_parameters_between_phases=true needs value.device=cuda, where there is a host "
            "to move to; set it to false",
        ),
        (
            [
                "value.scheduler.decay_style=linear",
                "value.scheduler.decay_updates=10",
                "value.scheduler.warmup_updates=0",
            ],
            "value.scheduler.decay_updates=10 reaches a learning rate of 0 before the last of 640 updates; "
            "set it to 640, or to ${updates_of_run:value}, which follows grpo.max_num_steps; or "
            "value.scheduler.min_lr above 0",
        ),
        (
            ["grpo.use_leave_one_out_baseline=true", "grpo.normalize_rewards=false"],
            "grpo.use_leave_one_out_baseline=true belongs to the estimator grpo and would do nothing with "
            "gae; set it to false; the estimator rloo has this baseline",
        ),
        (
            ["++grpo.adv_estimator.reward_weights.correct=1.0"],
            "grpo.adv_estimator.reward_weights={'correct': 1.0} would do nothing with the estimator gae, "
            "which sees the sum of the components; use grpo.adv_estimator.name=gdpo, or weigh the "
            "components in the environment",
        ),
    ],
)
def test_what_a_critic_cannot_do_is_told_under_its_keys(
    ppo: Demo, overrides: list[str], problem: str
) -> None:
    assert problems(ppo(*overrides)) == [problem]


def test_a_critic_replays_no_routers(ppo: Demo) -> None:
    told = problems(ppo("value.megatron_cfg.router_replay=true"))
    assert (
        "value.megatron_cfg.router_replay=true replays nothing: the engines sample with the policy's "
        "routers, and a critic has its own; set it to false"
    ) in told


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("value.num_epochs_per_rollout=0", "must be at least 1"),
        ("value.warmup_steps=-1", "must be at least 0"),
        ("value.clip_range=0.0", "must be above 0; null does not clip"),
        ("value.gae_gamma=1.5", "must be at least 0 and at most 1"),
        ("value.gae_gamma=-0.5", "must be at least 0 and at most 1"),
        ("value.gae_lambda=1.5", "must be at least 0 and at most 1"),
        ("value.gae_lambda=nan", "must be at least 0 and at most 1"),
        ("value.optimizer.lr=0.0", "must be above 0"),
        ("value.data_parallel_size=0", "must be at least 1"),
        ("value.train_global_batch_size=0", "must be at least 1"),
        ("value.megatron_cfg.tensor_model_parallel_size=0", "must be at least 1"),
        ("value.max_grad_norm=0.0", "must be above 0"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_number_out_of_its_range_is_the_only_problem(
    ppo: Demo, argument: str, rule: str, device: str
) -> None:
    places = [f"policy.device={device}", f"value.device={device}", "cluster.gpu_memory_gib=80"]
    gpus = [*places, "cluster.gpus_per_node=8", "value.precision=bfloat16", "policy.precision=bfloat16"]
    cfg = ppo(argument, *(gpus if device == "cuda" else []))
    assert problems(cfg, Machine.another) == [f"{argument} {rule}"]


def test_what_the_critic_has_from_the_policy_is_told_once(ppo: Demo) -> None:
    both = ("megatron_cfg.tensor_model_parallel_size=3", "optimizer.lr=0.0", "model_name=nowhere")
    for key in both:
        (problem,) = problems(ppo(f"policy.{key}", f"value.{key}"))
        assert problem.startswith(f"policy.{key} ")
    mine, theirs = problems(ppo("policy.model_name=nowhere", "value.model_name=elsewhere"))
    assert mine.startswith("policy.model_name=nowhere") and theirs.startswith("value.model_name=elsewhere")


def test_the_updates_of_both_groups_are_counted_apart(ppo: Demo) -> None:
    decay = ["scheduler.decay_style=linear", "scheduler.decay_updates=640"]
    both = [f"{name}.{key}" for name in ("policy", "value") for key in decay]
    assert problems(ppo(*both)) == []  # 80 steps of 8 updates
    (problem,) = problems(ppo(*both, "value.num_epochs_per_rollout=2"))
    assert problem.startswith(
        "value.scheduler.decay_updates=640 reaches a learning rate of 0 before the last of 1280 "
    )
    # In ten steps the critic warms up, and the policy makes no update.
    assert problems(ppo(*both, "value.warmup_steps=10", "policy.scheduler.decay_updates=560")) == []
    assert problems(ppo(*both, "policy.scheduler.decay_updates=560")) != []


def test_a_critic_may_have_another_layout_backend_and_kind_of_micro_batch(ppo: Demo) -> None:
    padded = [argument.replace("policy.", "value.") for argument in PADDED]
    assert problems(ppo(*padded, "value.backend=fsdp", "value.fsdp_cfg.tensor_parallel_size=2")) == []
    layout = ["value.megatron_cfg.pipeline_model_parallel_size=2", "value.data_parallel_size=1"]
    assert problems(ppo(*layout, "value.num_epochs_per_rollout=3")) == []


def test_a_critic_compares_with_no_group_and_knows_a_kl_in_the_reward(ppo: Demo) -> None:
    assert problems(ppo("grpo.num_generations_per_prompt=1")) == []
    kl = ("loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.01", SCORED)
    assert problems(ppo(*kl)) == []


def test_a_critics_model_knows_the_policys_tokens_and_is_there(ppo: Demo, tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", vocab_size=63)
    assert problems(ppo(f"value.model_name={small}")) == [
        f"value.model_name={small} has 63 tokens, but the policy samples from 64: a critic reads the "
        "policy's own tokens; use a model with the policy's tokenizer"
    ]
    larger = write_checkpoint(tmp_path / "larger", vocab_size=65, num_hidden_layers=4)
    assert problems(ppo(f"value.model_name={larger}")) == []
    short = write_checkpoint(tmp_path / "short", max_position_embeddings=31)
    assert problems(ppo(f"value.model_name={short}")) == [
        "value.max_total_sequence_length=32 must be at most the model's max_position_embeddings=31; "
        "shorten the sequences or use a model with a longer context"
    ]
    labels = write_checkpoint(tmp_path / "labels")
    header = json.dumps({"score.weight": {"shape": [2, 128]}}).encode()
    (labels / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert problems(ppo(f"value.model_name={labels}")) == [
        f"value.model_name={labels} has a tensor score.weight of shape [2, 128], but a critic's head has one "
        "output, [1, 128]; use a reward model with one label, or a language model"
    ]
    (small / "model.safetensors").unlink()
    assert any("has no weights" in problem for problem in problems(ppo(f"value.model_name={small}")))


def test_a_critic_with_another_vocabulary_is_refused(ppo: Demo, checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other")
    for path, words in ((checkpoint, ["a", "b", "c"]), (other, ["a", "c", "b"])):
        vocabulary = {word: number for number, word in enumerate(words)}
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    (problem,) = problems(ppo(f"value.model_name={other}"))
    assert problem == (
        f"value.model_name={other} has another vocabulary than policy.model_name, for example at id 1: the "
        "critic would read other tokens than the policy sampled; use a critic with the policy's tokenizer"
    )
