"""What verl's tables do to values. Standard library only."""

from __future__ import annotations

from math import ceil
from pathlib import PurePath
from typing import Any

from nemo_like.config.frameworks.entries import (
    LEFT_OUT,
    Convert,
    Noted,
    Theirs,
    Untranslatable,
)
from nemo_like.config.frameworks.value_changes import (
    home,
    one_of,
    unless_default,
)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
MEGATRON_STYLES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
REWARD = "rewards come from environments; choose one of configs/env, see docs/environments.md"
KL_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_KINDS |= {f"{name}+": kind for name, kind in KL_KINDS.items()}
LOSSES = {"vanilla": "policy_gradient", "gspo": "gspo_token", "sapo": "sapo", "cispo": "policy_gradient"}
BY_SAMPLE = ("gspo", "sapo")  # losses that verl averages per sample, whatever loss_agg_mode says
ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gae": "gae",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "gdpo": "gdpo",
}
WHITENING = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def is_megatron(theirs: Theirs) -> bool:
    return bool(theirs(f"{ACTOR}.strategy", "fsdp") == "megatron")


def gpus(theirs: Theirs) -> int:
    return int(theirs("trainer.n_gpus_per_node", 8)) * int(theirs("trainer.nnodes", 1))


def data_parallel_size(value: Any, theirs: Theirs) -> int:
    each = 1
    if is_megatron(theirs):
        for name in MEGATRON_STYLES:
            each *= int(theirs(f"{ACTOR}.megatron.{name}", 1))
    if gpus(theirs) % each:
        raise Untranslatable(f"{gpus(theirs)} GPUs do not hold whole replicas of {each}")
    return gpus(theirs) // each


def num_engines(value: Any, theirs: Theirs) -> int:
    each = int(theirs(f"{ROLLOUT}.tensor_model_parallel_size", 2))
    if gpus(theirs) % each:
        raise Untranslatable(f"{gpus(theirs)} GPUs do not hold whole engines of {each}")
    return gpus(theirs) // each


def samples(value: Any, theirs: Theirs) -> int:
    return int(value) * int(theirs(f"{ROLLOUT}.n", 1))


def per_gpu(value: Any, theirs: Theirs) -> int:
    return max(1, int(value) // data_parallel_size(None, theirs))


def updates_per_step(theirs: Theirs) -> int:
    prompts = int(theirs("data.train_batch_size", 1024))
    mini = int(theirs(f"{ACTOR}.ppo_mini_batch_size", 256))
    return ceil(prompts / mini) * int(theirs(f"{ACTOR}.ppo_epochs", 1))


def warmup(group: str) -> Convert:
    def convert(value: Any, theirs: Theirs) -> int:
        steps = int(theirs(f"{group}.lr_warmup_steps", -1))
        if steps <= 0 and (ratio := float(theirs(f"{group}.lr_warmup_steps_ratio", 0.0))):
            total = theirs("trainer.total_training_steps")
            if total is None:
                raise Untranslatable(
                    "is a share of the run's steps, which trainer.total_training_steps does not say; set "
                    "policy.scheduler.warmup_updates"
                )
            steps = int(ratio * int(total))
        return max(0, steps) * updates_per_step(theirs)

    return convert


def decay_style(group: str) -> Convert:
    kinds = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    return one_of(kinds, "set policy.scheduler.decay_style")


def is_decaying(group: str, theirs: Theirs) -> bool:
    names = ("lr_decay_style", "lr_scheduler_type")
    return any(theirs(f"{group}.{name}", "constant") != "constant" for name in names)


def decay_updates(group: str) -> Convert:
    def convert(value: Any, theirs: Theirs) -> Any:
        if not is_decaying(group, theirs):
            return LEFT_OUT
        steps = theirs(f"{group}.lr_decay_steps") or theirs("trainer.total_training_steps")
        if steps is None:
            raise Untranslatable(
                "decays to the end of the run, which trainer.total_training_steps does not say; set "
                "policy.scheduler.decay_updates"
            )
        return int(steps) * updates_per_step(theirs)

    return convert


def min_lr(group: str, factor: Convert) -> Convert:
    return lambda value, theirs: factor(value, theirs) if is_decaying(group, theirs) else LEFT_OUT


def share_of_lr(group: str) -> Convert:
    return lambda value, theirs: float(value or 0.0) * float(theirs(f"{group}.lr", 1e-6))


def packs(group: str, setting: str) -> Convert:
    """Return a conversion of a token budget, which counts only with dynamic batches."""
    return lambda value, theirs: value if theirs(f"{group}.{setting}", False) else LEFT_OUT


def micro_batch(group: str) -> Convert:
    is_packed = f"{ACTOR}.use_dynamic_bsz"
    return lambda value, theirs: LEFT_OUT if value is None or theirs(is_packed, False) else value


def backend(value: Any, theirs: Theirs) -> str:
    return one_of(
        {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}, "set policy.backend=fsdp or megatron"
    )(value, theirs)


def length(value: Any, theirs: Theirs) -> int:
    return int(theirs("data.max_prompt_length", 512)) + int(theirs("data.max_response_length", 512))


def clip(side: str) -> Convert:
    """Return a conversion of clip_ratio, which counts where the side's own key is null."""

    def convert(value: Any, theirs: Theirs) -> Any:
        return LEFT_OUT if theirs(f"{ACTOR}.clip_ratio_{side}") is not None else value

    return convert


def clip_low(value: Any, theirs: Theirs) -> Any:
    if value is None or float(value) < 1:
        return LEFT_OUT if value is None else value
    return Noted(0.999, f"a ratio is above 0, so {value} is no lower bound; 0.999 is next to none")


def dual_clip(value: Any, theirs: Theirs) -> Any:
    return value if theirs(f"{ACTOR}.policy_loss.loss_mode", "vanilla") == "vanilla" else LEFT_OUT


def loss_kind(value: Any, theirs: Theirs) -> str:
    remedy = "write the loss as loss_fn.kind=package.module:name, see docs/columns.md"
    return one_of(LOSSES, remedy)(value, theirs)


def token_level(value: Any, theirs: Theirs) -> bool:
    if theirs(f"{ACTOR}.policy_loss.loss_mode") in BY_SAMPLE:
        return False
    kinds = {"token-mean": True, "seq-mean-token-mean": False, "seq-mean-token-sum": False}
    kinds["seq-mean-token-sum-norm"] = False
    return one_of(kinds, "set loss_fn.token_level_loss")(value, theirs)


def normalizer(value: Any, theirs: Theirs) -> Any:
    if theirs(f"{ACTOR}.policy_loss.loss_mode") in BY_SAMPLE:
        return LEFT_OUT
    if value == "seq-mean-token-sum-norm":
        return int(theirs(f"{ACTOR}.loss_scale_factor", theirs("data.max_response_length", 512)))
    return 1 if value == "seq-mean-token-sum" else LEFT_OUT


def tau(name: str) -> Convert:
    def convert(value: Any, theirs: Theirs) -> Any:
        if theirs(f"{ACTOR}.policy_loss.loss_mode") != "sapo":
            return LEFT_OUT
        return theirs(f"{ACTOR}.policy_loss.{name}", value)

    return convert


def entropy(value: Any, theirs: Theirs) -> Any:
    return value if value else None


def kl_penalty(value: Any, theirs: Theirs) -> Any:
    in_loss, in_reward = theirs(f"{ACTOR}.use_kl_loss", False), theirs("algorithm.use_kl_in_reward", False)
    if in_loss and in_reward:
        raise Untranslatable("the KL is in the loss or in the reward, not in both; set one of them to false")
    if in_loss:
        return theirs(f"{ACTOR}.kl_loss_coef", 0.001)
    if not in_reward:
        return 0.0
    estimator = theirs("algorithm.adv_estimator", "gae")
    if estimator not in WHITENING:
        raise Untranslatable(
            f"the KL is not in the reward with algorithm.adv_estimator={estimator}; put it into the loss "
            "with loss_fn.reference_policy_kl_penalty"
        )
    return theirs("algorithm.kl_ctrl.kl_coef", 0.001)


def in_reward(value: Any, theirs: Theirs) -> bool:
    return bool(value) and kl_penalty(value, theirs) != 0.0


def kl_kind(other: str, is_wanted: bool) -> Convert:
    def convert(value: Any, theirs: Theirs) -> Any:
        if bool(theirs(other, False)) is not is_wanted:
            return LEFT_OUT
        return one_of(KL_KINDS, "set loss_fn.reference_policy_kl_type=k3")(value, theirs)

    return convert


def estimator(value: Any, theirs: Theirs) -> str:
    remedy = "set grpo.adv_estimator.name, see docs/rewards.md"
    return one_of(ESTIMATORS, remedy)(value, theirs)


def is_corrected(value: Any, theirs: Theirs) -> Any:
    if value is None:
        return False
    if value == "sequence" and theirs(f"{ACTOR}.policy_loss.loss_mode") != "gspo":
        raise Untranslatable("weights are per token; set loss_fn.use_importance_sampling_correction=true")
    return True


def bounds(part: str) -> Convert:
    """Return a conversion of the threshold: one number clamps, two set what is outside to 0."""

    def convert(value: Any, theirs: Theirs) -> Any:
        if theirs("algorithm.rollout_correction.rollout_is") is None:
            return LEFT_OUT
        low, _, high = str(value).rpartition("_")
        if part == "type":
            return "icepop" if low else "tis"
        if part == "low":
            return float(low) if low else LEFT_OUT
        return float(high)

    return convert


def files(value: Any, theirs: Theirs) -> Any:
    """Return the sources of one file or several. Files with equal names get those of their folders."""
    if value is None:
        raise Untranslatable("there is no file; set its path")
    paths = [str(path) for path in ([value] if isinstance(value, str) else value)]
    stems = [PurePath(path).stem for path in paths]
    sources: list[dict[str, Any]] = []
    for path, stem in zip(paths, stems, strict=True):
        name = {"name": PurePath(path).parent.name} if stems.count(stem) > 1 else {}
        is_json = PurePath(path).suffix in (".jsonl", ".json")
        reader = {"kind": "jsonl"} if is_json else {"kind": "huggingface", "split": "train"}
        keys = {"prompt_key": str(theirs("data.prompt_key", "prompt")), "answer_key": "answer"}
        sources.append({**name, **reader, "path": home(path), **keys})
    note = (
        "the reference answer lies in reward_model.ground_truth; write it into a field answer, for example "
        'by datasets: .map(lambda row: {"answer": row["reward_model"]["ground_truth"]}).to_parquet(FILE)'
    )
    return Noted(sources if len(sources) > 1 else sources[0], note)


def steps(value: Any, theirs: Theirs) -> Any:
    return LEFT_OUT if value is None else value


def epochs(value: Any, theirs: Theirs) -> Any:
    if theirs("trainer.total_training_steps") is not None:
        return LEFT_OUT
    prompts = theirs("data.train_batch_size", 1024)
    raise Untranslatable(
        f"a run counts steps alone; set grpo.max_num_steps to {value} x problems / {prompts}"
    )


def address(value: Any, theirs: Theirs) -> Any:
    return "auto" if int(value) > 1 else LEFT_OUT


def is_sampling(name: str) -> Convert:
    """Return a conversion of a setting of validation, which is greedy without do_sample."""

    def convert(value: Any, theirs: Theirs) -> Any:
        is_greedy = not theirs(f"{ROLLOUT}.val_kwargs.do_sample", False)
        if name == "temperature":
            return 0.0 if is_greedy else value
        if is_greedy or value == theirs(f"{ROLLOUT}.{name}"):
            return LEFT_OUT
        return 0 if name == "top_k" and int(value) < 1 else value

    return convert


def truncation(value: Any, theirs: Theirs) -> Any:
    raise Untranslatable("a prompt that is too long is left out, not cut")


def rank(group: str) -> Convert:
    return lambda value, theirs: LEFT_OUT if not int(theirs(f"{group}.lora_rank", 0) or 0) else value


def targets(value: Any, theirs: Theirs) -> Any:
    if not int(theirs(f"{MODEL}.lora_rank", 0) or 0):
        return LEFT_OUT
    return [value] if isinstance(value, str) else list(value)


def overlong(value: Any, theirs: Theirs) -> Any:
    group = "reward_model.reward_kwargs", "reward.reward_kwargs"
    is_on = any(theirs(f"{each}.overlong_buffer_cfg.enable", False) for each in group)
    return value if is_on else LEFT_OUT


def reward_manager(value: Any, theirs: Theirs) -> Any:
    return unless_default("dapo", REWARD)(value, theirs) if value != "naive" else LEFT_OUT


def router_replay(value: Any, theirs: Theirs) -> bool:
    kinds = {None: False, "disabled": False, "R3": True}
    return one_of(kinds, "set policy.megatron_cfg.router_replay")(value, theirs)
