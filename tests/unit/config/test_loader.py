from __future__ import annotations

import os
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import hydra
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_like.algorithms.options import KLType
from nemo_like.config.arguments import read_arguments
from nemo_like.config.composition import composing
from nemo_like.config.import_path import load_by_path
from nemo_like.config.loader import to_dict, to_yaml
from nemo_like.config.problems import ConfigError
from nemo_like.config.search_path import lists_from_text
from nemo_like.config.secrets import ReferringText
from nemo_like.configuration import Config, load_config
from nemo_like.policy.options import BACKEND_KINDS, Device, LRDecayStyle, PolicyConfig
from nemo_like.tripwires.options import Tripwires

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
DEMO = CONFIGS / "grpo_arithmetic_cpu.yaml"
RECIPES = CONFIGS.parent / "recipes"

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_loads(path: Path) -> None:
    overrides = [] if path == DEMO else ["++policy.model_name=somewhere"]
    assert isinstance(load_config(path, overrides), Config)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/default.yaml")), ids=lambda path: path.parent.name)
def test_every_default_file_says_what_its_group_is_for(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_the_result_is_made_of_typed_dataclasses_and_enums() -> None:
    cfg = load_config(DEMO)
    assert isinstance(cfg.policy, PolicyConfig)
    assert cfg.policy.device is Device.cpu
    assert cfg.policy.scheduler.decay_style is LRDecayStyle.linear
    assert cfg.policy.optimizer.lr == 1e-3
    assert cfg.loss_fn.ratio_clip_c is None


def test_interpolation_makes_the_checkpoint_directory_follow_the_variable() -> None:
    cfg = load_config(DEMO, ["vars.model_seed=3", "grpo.seed=4"])
    assert cfg.policy.model_name == ".cache/models/arithmetic-d2-s3"


def test_a_resolved_configuration_reads_back_equal(write: Write) -> None:
    cfg = load_config(DEMO, ["grpo.seed=3", "vars.x=[1]", "loss_fn.ratio_clip_c=3", "logger.run_name='a: b'"])
    assert load_config(write("resolved.yaml", to_yaml(cfg))) == cfg


def test_to_dict_holds_plain_values_only() -> None:
    plain = to_dict(load_config(DEMO))
    assert plain["policy"]["device"] == "cpu"
    assert plain["policy"]["megatron_cfg"]["tensor_model_parallel_size"] == 1


# Inheritance


def test_a_file_wins_over_its_defaults_and_later_defaults_over_earlier_ones(write: Write) -> None:
    write("first.yaml", "grpo: {seed: 11, val_period: 11, max_num_steps: 11}")
    write("second.yaml", "grpo: {seed: 12, val_period: 12}")
    path = write("top.yaml", f"defaults: [{DEMO}, first, second.yaml]\ngrpo: {{seed: 13}}")
    grpo = load_config(path).grpo
    assert (grpo.seed, grpo.val_period, grpo.max_num_steps, grpo.num_prompts_per_step) == (13, 12, 11, 128)


def test_defaults_may_be_one_path_relative_to_the_file(write: Write) -> None:
    write("base/base.yaml", f"defaults: {DEMO}\ngrpo: {{seed: 5}}")
    assert load_config(write("recipes/mine.yaml", "defaults: ../base/base.yaml")).grpo.seed == 5


def test_a_group_is_read_from_its_directory_and_put_under_its_key(write: Write) -> None:
    write("loss_fn/clip_higher.yaml", "defaults: [default]\nratio_clip_max: 0.28")
    path = write("top.yaml", "defaults:\n  - grpo_arithmetic_cpu\n  - override loss_fn: clip_higher")
    loss = load_config(path).loss_fn
    assert (loss.ratio_clip_min, loss.ratio_clip_max) == (0.2, 0.28)


def test_two_files_that_choose_from_the_same_groups_are_refused_with_a_remedy(write: Write) -> None:
    write("left.yaml", "defaults: grpo_arithmetic_cpu\ngrpo: {seed: 7}")
    write("right.yaml", "defaults: grpo_arithmetic_cpu\nloss_fn: {ratio_clip_c: 3}")
    message = problems(write("top.yaml", "defaults: [left, right]"))
    assert "grpo appears more than once in the final defaults list" in message
    assert "name the group once, and write `- override GROUP: NAME`" in message


def test_a_cycle_of_defaults_is_named_file_by_file(write: Write) -> None:
    write("a.yaml", "defaults: b.yaml")
    path = write("b.yaml", "defaults: a.yaml")
    message = problems(path)
    assert "is reached from itself by its defaults" in message
    assert message.count("b.yaml") >= 2 and "a.yaml" in message


def test_a_missing_default_names_the_file_that_wants_it_and_the_nearest_there_is(write: Write) -> None:
    write("shared.yaml", "grpo: {seed: 1}")
    path = write("top.yaml", "defaults: shard.yaml")
    message = problems(path)
    assert f"is not a configuration (named in the defaults of {path})" in message
    assert f"did you mean {path.parent / 'shared.yaml'}?" in message


def test_a_configuration_anywhere_builds_on_what_is_shipped(write: Write) -> None:
    own = """
defaults:
  - grpo_arithmetic_cpu
  - env@env.math: math_verify
data: {default: {env: math}}
"""
    cfg = load_config(write("mine.yaml", own))
    assert (cfg.data.train[0].env, cfg.env["math"].kind) == ("math", "math_verify")


def test_what_is_beside_a_configuration_comes_before_what_is_shipped(write: Write) -> None:
    write("env/f1.yaml", "kind: regex\noptions: {pattern: a}\ndefaults: default")
    path = write("mine.yaml", "defaults: [grpo_arithmetic_cpu, env@env.own: f1]")
    cfg = load_config(path)
    assert (cfg.env["own"].kind, cfg.env["own"].num_actors) == ("regex", 1)


@pytest.mark.parametrize(
    ("entry", "remedy"),
    [
        ("{grpo: defualt}", f"did you mean {CONFIGS / 'grpo' / 'default.yaml'}?"),
        ("grpo_arithmetic_cpus", f"did you mean {DEMO}?"),
        ("mine2", f"there are {CONFIGS / 'distill_arithmetic_cpu.yaml'}, "),
    ],
)
def test_a_default_that_is_nowhere_proposes_the_nearest_shipped_one_and_never_the_file_itself(
    write: Write, entry: str, remedy: str
) -> None:
    path = write("mine.yaml", f"defaults: [{entry}]")
    message = problems(path)
    assert f"is not a configuration (named in the defaults of {path}); {remedy}" in message


def test_a_mistyped_config_path_proposes_the_nearest(tmp_path: Path) -> None:
    message = problems(CONFIGS / "grpo_arithmetik_cpu.yaml")
    assert f"did you mean {DEMO}?" in message


def test_a_file_that_is_no_yaml_is_not_said_to_be_missing(write: Write) -> None:
    assert "rows.jsonl is no YAML file (.yaml or .yml)" in problems(write("rows.jsonl", "{}"))


def test_a_defaults_entry_of_another_shape_is_refused(write: Write) -> None:
    message = problems(write("top.yaml", "defaults: [{grpo: a, policy: b}]"))
    assert "an entry is a name or path, one group: name, or one group@key: name" in message


@pytest.mark.parametrize("text", ["grpo: [1", "grpo: {seed: 1}\ngrpo: {seed: 2}", "grpo: ${mul:"])
def test_broken_yaml_names_the_file(write: Write, text: str) -> None:
    message = problems(write("broken.yaml", text))
    assert "broken.yaml is not valid YAML" in message


def test_a_file_that_is_a_list_is_refused(write: Write) -> None:
    assert "must be a mapping of groups of keys" in problems(write("list.yaml", "- 1\n- 2"))


# Overrides


@pytest.mark.parametrize(
    ("argument", "group", "key", "value"),
    [
        ("grpo.seed=5", "grpo", "seed", 5),
        ("++grpo.seed=5", "grpo", "seed", 5),
        ("loss_fn.ratio_clip_c=3", "loss_fn", "ratio_clip_c", 3.0),
        ("loss_fn.reference_policy_kl_type=k2", "loss_fn", "reference_policy_kl_type", KLType.k2),
        ("grpo.val_at_start=false", "grpo", "val_at_start", False),
        ("generation.temperature=1e-1", "generation", "temperature", 0.1),
        ("generation.top_k=null", "generation", "top_k", None),
        ("logger.run_name='my run, 1'", "logger", "run_name", "my run, 1"),
        ('logger.run_name="a=b"', "logger", "run_name", "a=b"),
        ("logger.run_name=2024", "logger", "run_name", "2024"),
        ("grpo={seed: 9, val_period: 0}", "grpo", "seed", 9),
        ("grpo.max_num_steps=${grpo.seed}", "grpo", "max_num_steps", 1),
        ("grpo.max_num_steps='${mul:${.seed},3}'", "grpo", "max_num_steps", 3),
    ],
)
def test_an_argument_sets_a_typed_value(
    resolved_demo: Path, argument: str, group: str, key: str, value: object
) -> None:
    result = getattr(getattr(load_config(resolved_demo, [argument]), group), key)
    assert result == value and type(result) is type(value)


def test_a_mapping_argument_keeps_the_other_keys_of_its_group() -> None:
    assert load_config(DEMO, ["grpo={seed: 9, val_period: 0}"]).grpo.num_prompts_per_step == 128


def test_later_arguments_win() -> None:
    assert load_config(DEMO, ["grpo.seed=2", "grpo.seed=3"]).grpo.seed == 3
    assert load_config(DEMO, ["grpo.seed=2", "grpo.seed=3", "grpo.seed=2"]).grpo.seed == 2


def test_a_tilde_makes_an_optional_key_null_again() -> None:
    assert load_config(DEMO, ["loss_fn.ratio_clip_c=3", "~loss_fn.ratio_clip_c"]).loss_fn.ratio_clip_c is None


@pytest.mark.parametrize(
    "text", ["policy.model_name=~/model", "policy.model_name='~/model'", 'policy={model_name: "~/model"}']
)
def test_a_path_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert load_config(DEMO, [text]).policy.model_name == "/home/ada/model"


def test_paths_of_a_file_of_a_list_and_of_a_mapping_may_begin_with_a_tilde(
    monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    teacher = "{model_name: /t, models: {a: ~/a, b: /b}}"
    data = "{train: [{path: ~/c}]}"
    defaults = "[teacher: default, grpo_arithmetic_cpu]"
    text = f"{{defaults: {defaults}, teacher: {teacher}, data: {data}}}"
    cfg = load_config(write("mine.yaml", text))
    assert cfg.teacher is not None and cfg.teacher.models == {"a": "/home/ada/a", "b": "/b"}
    assert cfg.data.train[0].path == "/home/ada/c"


def test_a_text_that_is_no_path_keeps_its_tilde() -> None:
    assert load_config(DEMO, ["logger.wandb.notes='~/x'"]).logger.wandb.notes == "~/x"


def test_modules_beside_a_configuration_are_found_here_and_by_processes(
    monkeypatch: pytest.MonkeyPatch, write: Write, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "/other")
    path = write("mine.yaml", "defaults: grpo_arithmetic_cpu")
    load_config(path)
    assert os.environ["PYTHONPATH"] == "/other"  # it has none
    write("some_reward_of_mine.py", "def reward(turn): return 1.0")
    load_config(path)
    load_config(path)
    assert (os.environ["PYTHONPATH"], sys.path[-1]) == (f"/other:{tmp_path}", str(tmp_path))
    assert load_by_path("some_reward_of_mine:reward")(None) == 1.0


@pytest.mark.parametrize(
    ("arguments", "updates"),
    [
        ([], 1024 * 5 // 128),
        (["grpo.num_epochs_per_rollout=2"], 80),
        (["policy.scheduler.warmup_updates=50"], 51),  # the run ends in the warm-up
        (["policy.train_global_batch_size=0"], 1),  # refused elsewhere
        (["policy.scheduler.decay_updates=7"], 7),
    ],
)
def test_a_schedule_ends_with_the_run(write: Write, arguments: list[str], updates: int) -> None:
    text = "{defaults: [grpo_arithmetic_cpu], policy: {scheduler: {warmup_updates: 0, decay_updates: %s}}}"
    path = write("mine.yaml", text % '"${updates_of_run:policy}"')
    cfg = load_config(path, ["grpo.max_num_steps=5", *arguments])
    assert cfg.policy.scheduler.decay_updates == updates


def test_the_schedules_of_policy_and_critic_end_with_their_own_last_update(write: Write) -> None:
    text = (
        "{defaults: [ppo_arithmetic_cpu], policy: {scheduler: {decay_updates: '${updates_of_run:policy}'}}}"
    )
    path = write("mine.yaml", text)
    cfg = load_config(
        path, ["grpo.max_num_steps=10", "value.warmup_steps=4", "value.num_epochs_per_rollout=2"]
    )
    assert cfg.value is not None
    assert cfg.policy.scheduler.decay_updates == 6 * 1024 // cfg.policy.train_global_batch_size
    assert cfg.value.scheduler.decay_updates == 10 * 1024 // cfg.value.train_global_batch_size * 2


def test_a_tilde_with_another_value_than_the_current_one_is_refused() -> None:
    message = problems(DEMO, "loss_fn.ratio_clip_c=3", "~loss_fn.ratio_clip_c=4")
    assert "loss_fn.ratio_clip_c is 3, not 4" in message


def test_a_key_that_must_have_a_value_cannot_be_removed() -> None:
    assert "grpo.seed must have a value and cannot be removed" in problems(DEMO, "~grpo.seed")


def test_a_plus_is_for_keys_without_a_value_only(write: Write) -> None:
    assert "grpo.seed already has the value 1" in problems(DEMO, "+grpo.seed=2")
    path = write("top.yaml", f"defaults: {CONFIGS / 'grpo_gpu.yaml'}\npolicy:\n  model_name: ???")
    assert "policy.model_name has no value" in problems(path)
    assert load_config(path, ["+policy.model_name=x"]).policy.model_name == "x"


def test_a_sweep_is_refused_without_multirun() -> None:
    message = problems(DEMO, "grpo.seed=1,2", "policy=fsdp,default", "hydra.sweeper.n_trials=3")
    assert "grpo.seed takes one value here, not a sweep; add --multirun" in message
    assert "policy takes one value here, not a sweep; add --multirun" in message
    assert "hydra.sweeper.n_trials is a setting of Hydra's for several runs; add --multirun" in message


@pytest.mark.parametrize("argument", ["grpo.seed", "grpo.seed=[1", "--grpo.seed=3", "="])
def test_an_argument_that_is_no_assignment_says_how_to_write_one(resolved_demo: Path, argument: str) -> None:
    message = problems(resolved_demo, argument)
    assert f"argument {argument!r} cannot be read; write key=value" in message


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["policy=fsdp", "policy.lora={enabled: true, rank: 3}", "++policy.optimizer.lr=1e-4"],
        ["env@env.math=math_verify", "env.math.options.extra=[{a: 1}]", "~env.arithmetic"],
        ["data.train=[{path: a}, {path: b, weight: 2}]", "vars={x: {y: 1}}", "vars.x.z=${grpo.seed}"],
        ["+teacher=default", "teacher.model_name='a: b'", "~loss_fn.ratio_clip_c"],
        ["vars={x: {a: 1}, y: '${vars.x}'}", "++vars.y.b=2", "vars.z='${vars.y}'"],
        ["vars.x={a: 1}", "vars.x={b: 2}", "~vars.x.b", "+vars.y=???"],
    ],
)
def test_it_is_the_configuration_that_hydra_composes(arguments: list[str]) -> None:
    with composing(DEMO) as files:
        read = read_arguments(files, arguments, Config)
        assert not read.problems
        whole = hydra.compose(DEMO.stem, [*files.search_path, *read.for_hydra])
        composed = lists_from_text(OmegaConf.to_container(whole, resolve=False))
        assert files.compose(read.files, read.values) == composed


# Groups, chosen by a file or an argument


def test_a_group_is_chosen_by_name_and_the_files_own_values_stay() -> None:
    policy = load_config(DEMO, ["policy=fsdp"]).policy
    assert (policy.backend, policy.data_parallel_size) == ("fsdp", 2)
    assert load_config(DEMO, ["+policy=fsdp"]).policy == policy


def test_a_group_that_the_defaults_lack_is_added() -> None:
    env = load_config(DEMO, ["env@env.math=math_verify", "env.math.num_actors=3"]).env["math"]
    assert (env.kind, env.num_actors, env.batch_size) == ("math_verify", 3, 16)


def test_a_group_under_a_key_is_chosen_anew_or_removed() -> None:
    assert load_config(DEMO, ["env@env.arithmetic=exact_match"]).env["arithmetic"].options["must_end"] is True
    overrides = ["env@env.sums=arithmetic", "~env.arithmetic", "data.default.env=sums"]
    assert list(load_config(DEMO, overrides).env) == ["sums"]


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("policy=fdsp", "policy=fdsp must be a configuration of the group policy; did you mean fsdp?"),
        ("grpo=qqqqqq", "grpo=qqqqqq must be a configuration of the group grpo; there are default"),
        ("grups@env.x=f1", "grups is not a group of configurations"),
        ("env=f1", "env has entries with names of their own; choose for one of them: env@env.NAME=..."),
        ("policy@polcy=fsdp", "polcy is not a key of the configuration"),
        ("hydra.searchpath=[/nowhere]", "path=/nowhere is not available"),
    ],
)
def test_a_choice_that_is_none_says_what_there_is(argument: str, rule: str) -> None:
    assert rule in problems(DEMO, argument)


@pytest.mark.parametrize("backend", BACKEND_KINDS.names())
def test_a_file_chooses_for_one_of_its_defaults(write: Write, backend: str) -> None:
    path = write("mine.yaml", f"defaults:\n  - grpo_arithmetic_cpu\n  - override policy: {backend}_lora")
    policy = load_config(path).policy
    assert (policy.backend, policy.lora.enabled, policy.lora.rank) == (backend, True, 16)


def test_an_optional_default_may_be_missing(write: Write) -> None:
    path = write("mine.yaml", "defaults: [grpo_arithmetic_cpu, {optional machine@_global_: local}]")
    assert load_config(path) == load_config(DEMO)
    write("machine/local.yaml", "grpo: {seed: 5}")
    assert load_config(path).grpo.seed == 5


def test_the_files_own_values_may_come_first(write: Write, tmp_path: Path) -> None:
    write("later.yaml", "grpo: {seed: 5}")
    path = write(
        "mine.yaml", "defaults: [grpo_arithmetic_cpu, _self_, later]\ngrpo: {seed: 4, val_period: 4}"
    )
    grpo = load_config(path).grpo
    assert (grpo.seed, grpo.val_period) == (5, 4)


def test_a_header_puts_a_group_where_it_says(write: Write) -> None:
    write("experiment/long.yaml", "# @package _global_\ngrpo: {max_num_steps: 999}\nlogger: {run_name: long}")
    path = write("mine.yaml", "defaults: [grpo_arithmetic_cpu]")
    cfg = load_config(path, ["experiment=long"])
    assert (cfg.grpo.max_num_steps, cfg.logger.run_name) == (999, "long")
    assert "experiment=lang must be a configuration of the group experiment; did you mean long?" in problems(
        path, "experiment=lang"
    )


def test_a_recipe_is_found_by_its_name_from_anywhere(write: Write) -> None:
    path = write("deep/below/mine.yaml", "defaults: [grpo-qwen3-8b-4n8g]\ngrpo: {seed: 9}")
    cfg = load_config(path)
    assert (cfg.grpo.seed, cfg.policy.model_name) == (9, "models/Qwen3-8B")


def test_a_search_path_adds_a_folder_of_groups(write: Write, tmp_path: Path) -> None:
    write("elsewhere/policy/own.yaml", "defaults: [default]\nmax_grad_norm: 7.0")
    cfg = load_config(DEMO, ["policy=own", f"hydra.searchpath=[{tmp_path / 'elsewhere'}]"])
    assert cfg.policy.max_grad_norm == 7.0


def test_a_configuration_of_a_package_is_named_by_its_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("shared_groups/__init__.py", "")
    own = write("shared_groups/policy/own.yaml", "defaults: [default]")
    monkeypatch.syspath_prepend(tmp_path)
    path = write("mine.yaml", "defaults: [grpo_arithmetic_cpu, override policy: owm]")
    assert problems(path, "hydra.searchpath=[pkg://shared_groups]").endswith(f"; did you mean {own}?")


@pytest.mark.parametrize("is_namespace", [False, True])
def test_a_package_may_be_a_folder_of_groups(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_namespace: bool
) -> None:
    if not is_namespace:
        write("shared_groups/__init__.py", "")
    write("shared_groups/policy/own.yaml", "defaults: [default]\nmax_grad_norm: 7.0")
    monkeypatch.syspath_prepend(tmp_path)
    cfg = load_config(DEMO, ["policy=own", "hydra.searchpath=[pkg://shared_groups]"])
    assert cfg.policy.max_grad_norm == 7.0
    assert "pkg:/none_such is not available" in problems(DEMO, "hydra.searchpath=[pkg://none_such]")


def test_a_configuration_may_have_a_search_path_of_its_own(write: Write, tmp_path: Path) -> None:
    own = write("elsewhere/loss_fn/own.yaml", "defaults: [default]\nratio_clip_max: 0.5")
    other = write("other/loss_fn/own.yaml", "defaults: [default]\nratio_clip_max: 0.6")
    defaults = "defaults: [grpo_arithmetic_cpu, override loss_fn: own]"
    path = write("mine.yaml", f"{defaults}\nhydra: {{searchpath: [{tmp_path / 'elsewhere'}]}}")
    assert load_config(path).loss_fn.ratio_clip_max == 0.5
    argument = f"hydra.searchpath=[{tmp_path / 'other'}]"
    assert load_config(path, [argument]).loss_fn.ratio_clip_max == 0.6
    other.write_text("ratio_clip_mux: 1")
    assert f"{other}: loss_fn.ratio_clip_mux is not a key" in problems(path, argument)
    own.write_text("ratio_clip_mux: 1")
    assert f"{own}: loss_fn.ratio_clip_mux is not a key" in problems(path)


@pytest.mark.parametrize("entry", ["../configs/demo", "../configs/demo.yaml", "{}/configs/demo.yaml"])
def test_a_default_that_is_a_path_brings_its_own_groups(write: Write, tmp_path: Path, entry: str) -> None:
    write("configs/loss_fn/own.yaml", "defaults: [default]\nratio_clip_max: 0.5")
    write("configs/first.yaml", "grpo: {seed: 3, val_period: 3}")
    write(
        "configs/demo.yaml",
        "defaults: [grpo_arithmetic_cpu, first, {override loss_fn: own}]\ngrpo: {seed: 4}",
    )
    cfg = load_config(
        write("mine/top.yaml", f"defaults: [{entry.format(tmp_path)}]\nlogger: {{run_name: x}}")
    )
    assert (cfg.grpo.seed, cfg.grpo.val_period, cfg.loss_fn.ratio_clip_max) == (4, 3, 0.5)


def test_a_path_to_what_is_shipped_can_be_chosen_from(write: Write) -> None:
    path = write("mine.yaml", f"defaults: {DEMO}")
    assert load_config(path, ["policy=fsdp"]).policy.backend == "fsdp"


@pytest.mark.parametrize("folder", ["../groups/env", "{}/groups/env", str(CONFIGS / "env")])
def test_the_folder_of_a_group_may_be_a_path(write: Write, tmp_path: Path, folder: str) -> None:
    write("groups/env/f1.yaml", "defaults: [base]\nkind: f1\noptions: {answer_pattern: null}")
    write("groups/env/base.yaml", (CONFIGS / "env" / "default.yaml").read_text())
    entry = f"{folder.format(tmp_path)}@env.task: f1"
    cfg = load_config(write("mine/top.yaml", f"defaults: [{DEMO}, {{{entry}}}]"))
    assert cfg.env["task"].kind == "f1"


def test_a_path_to_no_file_proposes_the_nearest(write: Write, tmp_path: Path) -> None:
    write("base.yaml", "grpo: {seed: 1}")
    message = problems(write("below/top.yaml", "defaults: [../bas]"))
    assert "bas.yaml is not a file (named in the defaults of" in message
    assert f"did you mean {tmp_path / 'below' / '..' / 'base.yaml'}?" in message


# Mappings, lists and removal


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["{a: 1, b: 2}"], {"a": 1, "b": 2}),
        (["{a: 1, b: 2}", "{}"], {}),
        (["{a: 1, b: 2}", "{c: {d: 3}}"], {"c": {"d": 3}}),
    ],
)
def test_a_mapping_replaces_the_one_before(arguments: list[str], options: object) -> None:
    cfg = load_config(DEMO, [f"env.arithmetic.options={argument}" for argument in arguments])
    assert cfg.env["arithmetic"].options == options


def test_an_entry_of_a_mapping_is_removed() -> None:
    two = "env.arithmetic.options={a: 1, b: 2}"
    assert load_config(DEMO, [two, "~env.arithmetic.options.a"]).env["arithmetic"].options == {"b": 2}
    assert load_config(DEMO, [two, "~env.arithmetic.options.a=1"]).env["arithmetic"].options == {"b": 2}
    assert "env.arithmetic.options.c is not there and cannot be removed" in problems(
        DEMO, two, "~env.arithmetic.options.c"
    )
    assert "env.arithmetic.options.a is 1, not 2" in problems(DEMO, two, "~env.arithmetic.options.a=2")


def test_a_source_takes_the_place_of_a_list_and_a_list_that_of_a_source() -> None:
    two, one = "data.train=[{name: a}, {name: b}]", "data.train={name: c}"
    assert [source.name for source in load_config(DEMO, [one, two]).data.train] == ["a", "b"]
    assert [source.name for source in load_config(DEMO, [two, one]).data.train] == ["c"]


# Strictness


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("grpo.num_prompt_per_step", "grpo.num_prompts_per_step"),
        ("grpo.sed", "grpo.seed"),
        ("grpo.steps", "grpo.max_num_steps"),
        ("policy.lr", "policy.optimizer.lr"),
        ("policy.fsdp_cfg.lora.enabled", "policy.lora.enabled"),
        ("policy.tensor_model_parallel_size", "policy.megatron_cfg.tensor_model_parallel_size"),
        ("polcy.device", "policy.device"),
        ("polcy", "policy"),
        ("loss.ratio_clip_min", "loss_fn.ratio_clip_min"),
        ("generation.vllm_cfg.max_num_seq", "generation.vllm_cfg.max_num_seqs"),
    ],
)
def test_a_mistyped_key_proposes_the_nearest(resolved_demo: Path, write: Write, key: str, meant: str) -> None:
    expected = f"{key} is not a key of the configuration; did you mean {meant}?"
    assert expected in problems(resolved_demo, f"{key}=1")
    assert expected in problems(resolved_demo, f"++{key}=1")
    text = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(key.split(".")))[:-1] + " 1"
    path = write("typo.yaml", f"defaults: {resolved_demo}\n{text}")
    message = problems(path)
    assert str(path) in message and meant.partition(".")[0] in message


def test_an_unknown_key_like_no_other_lists_what_is_there() -> None:
    assert "known there: kind, options, num_actors" in problems(DEMO, "env.sums.zzzzqqqq=1")


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("grpo.seed=abc", "grpo.seed='abc' must be an integer"),
        ("grpo.seed=1.5", "grpo.seed=1.5 must be an integer"),
        ("grpo.seed=true", "grpo.seed=True must be an integer"),
        ("grpo.seed='5'", "grpo.seed='5' must be an integer"),
        ("grpo.seed=null", "grpo.seed=null must be an integer"),
        ("grpo.val_at_start=1", "grpo.val_at_start=1 must be true or false"),
        ("policy.max_grad_norm=big", "policy.max_grad_norm='big' must be a number"),
        ("loss_fn.ratio_clip_c=big", "loss_fn.ratio_clip_c='big' must be a number or null"),
        ("logger.log_dir=[a]", "logger.log_dir=['a'] must be a string"),
        ("policy.device=gpu", "policy.device='gpu' must be one of cpu, cuda"),
        (
            "policy.scheduler.decay_style=lineer",
            "'lineer' must be one of constant, linear, cosine; did you mean linear?",
        ),
        ("grpo=3", "grpo is a group of keys and cannot be 3"),
    ],
)
def test_a_value_of_the_wrong_type_says_what_is_expected(
    resolved_demo: Path, argument: str, rule: str
) -> None:
    message = problems(resolved_demo, argument)
    assert rule in message and f"argument {argument!r}" in message


def test_a_group_cannot_be_an_interpolation() -> None:
    assert "data.default is a group of keys" in problems(DEMO, "data.default=${data.train}")


def test_a_wrong_value_in_a_file_names_the_file(write: Write) -> None:
    path = write("wrong.yaml", f"defaults: {DEMO}\npolicy: {{optimizer: {{lr: fast}}}}")
    assert f"{path}: policy.optimizer.lr='fast' must be a number" in problems(path)


def test_a_mistyped_entry_is_told_once_with_the_one_that_was_meant() -> None:
    (problem,) = problems(DEMO, "env.arithmetics.batch_size=3").splitlines()[1:]
    assert "env.arithmetics has no env.arithmetics.kind and " in problem
    assert " more; did you mean env.arithmetic? Else add `- env@env.arithmetics: KIND` to" in problem


def test_a_source_that_is_a_text_is_told_to_be_a_path() -> None:
    assert "write data.train.path=train.jsonl" in problems(DEMO, "data.train=train.jsonl")


def test_a_file_that_builds_on_parts_alone_is_told_one_thing(write: Write) -> None:
    path = write("parts.yaml", "defaults: [{env@env.mine: f1}]\ngrpo: {seed: 2}")
    (problem,) = problems(path).splitlines()[1:]
    assert problem.startswith(f"  - {path} names no whole file to build on, and lacks loss_fn, policy, ")


def test_a_path_to_a_file_is_told_the_module() -> None:
    with pytest.raises(ValueError, match=r"'rewards/mine.py:loss' names a file; write the module, mine:loss"):
        load_by_path("rewards/mine.py:loss")


def test_off_without_quotes_says_to_quote_it(write: Write) -> None:
    path = write("mine.yaml", f"defaults: {DEMO}\ndebug: {{tripwires: off}}")
    assert "debug.tripwires=False must be one of off, cheap, all; write it as 'off', with quotes" in problems(
        path
    )
    assert load_config(DEMO, ["debug.tripwires=off"]).debug.tripwires is Tripwires.off


def test_all_problems_are_listed_at_once() -> None:
    message = problems(DEMO, "grpo.sed=1", "policy.device=gpu", "grpo.seed=x")
    assert message.startswith("3 problems in the configuration:")


def test_a_key_without_a_value_is_named(write: Write) -> None:
    others = ("loss_fn", "generation", "rollout", "data", "logger", "checkpointing", "cluster", "debug")
    defaults = ", ".join(f"{{{group}: default}}" for group in others)
    path = write("empty.yaml", f"defaults: [{{grpo: none}}, {defaults}]")
    write("grpo/none.yaml", "seed: 1")
    message = problems(path)
    assert "grpo.num_prompts_per_step has no value" in message
    assert "policy has no value; set its keys in" in message
    assert "grpo.seed" not in message


@pytest.mark.parametrize(
    ("name", "suggested"),
    [("dpo", ""), ("ppo", ""), ("spo", "sapo"), ("gsppo", "gspo"), ("cipso", "cispo")],
)
def test_a_name_of_three_letters_is_taken_for_one_at_most_one_letter_away(name: str, suggested: str) -> None:
    for argument in (f"loss_fn={name}", f"loss_fn.kind={name}"):
        told = problems(DEMO, argument)
        assert told.endswith(f"did you mean {suggested}?") if suggested else "did you mean" not in told


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("loss_fn=grpo", "; grpo is policy_gradient, whose ratio is clipped"),
        ("loss_fn.kind=DAPO", "; DAPO is policy_gradient, with loss_fn.ratio_clip_max=0.28 and grpo.use"),
        ("loss_fn.kind=dr-grpo", "; dr-grpo is policy_gradient, with loss_fn.sequence_length_normalizer"),
        ("grpo.adv_estimator.name=reinforce++", "; reinforce++ is reinforce_plus_plus"),
        ("grpo.adv_estimator.name=ppo", "; ppo is gae, with a critic"),
        ("data.train.kind=csv", "; csv is huggingface, which reads such files"),
    ],
)
def test_a_name_of_the_field_is_told_its_name_here(argument: str, told: str) -> None:
    message = problems(DEMO, argument)
    assert told in message and "did you mean" not in message


def test_a_file_that_builds_on_none_is_told_one_thing(write: Write) -> None:
    path = write("bare.yaml", "policy: {model_name: '${nowhere}'}\ndata: {train: {path: x.jsonl}}")
    (problem,) = problems(path).splitlines()[1:]
    assert problem.startswith(f"  - {path} names no file to build on, and lacks grpo, loss_fn, generation, ")
    assert problem.endswith("put `defaults: [grpo_cpu]` at its top, or another file of configs/, as grpo_gpu")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "defaults: [DEMO, {env: f1}]",
            "`- env: f1` in the defaults gives no name to its entry; write `- env@",
        ),
        (
            "defaults: DEMO\nenv: [f1]",
            "env=['f1'] must be a mapping, in which each entry has a name and keys",
        ),
        ("defaults: DEMO\nenv: f1", "env='f1' must be a mapping, in which each entry has a name and keys"),
        (
            "defaults: DEMO\nenv: {words: f1}",
            "env.words is a group of keys and cannot be 'f1'; set env.words.kind and so on, or leave it out "
            "and add `- env@env.words: f1` to the defaults",
        ),
        ("defaults: DEMO\nenv: {words: }", "env.words is a group of keys and cannot be null; set env.words"),
        (
            "defaults: DEMO\npolicy: fsdp",
            "policy is a group of keys and cannot be 'fsdp'; set policy.model_name and so on, or leave it "
            "out and add `- policy: fsdp` to the defaults",
        ),
    ],
)
def test_an_entry_without_a_name_or_keys_is_told_one_thing(write: Write, text: str, told: str) -> None:
    path = write("mine.yaml", text.replace("DEMO", str(DEMO)))
    (problem,) = problems(path).splitlines()[1:]
    assert problem.startswith(f"  - {path}: {told}")


# Interpolation


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("${add:1,2,3}", 6),
        ("${sub:7,3}", 4),
        ("${mul:${grpo.num_prompts_per_step},${.num_generations_per_prompt}}", 1024),
        ("${div:12,4}", 3),
        ("${div:${mul:${grpo.num_prompts_per_step},8},${policy.train_global_batch_size}}", 8),
    ],
)
def test_arithmetic_is_resolved(resolved_demo: Path, write: Write, expression: str, value: int) -> None:
    path = write("top.yaml", f'defaults: {resolved_demo}\ngrpo: {{max_num_steps: "{expression}"}}')
    assert load_config(path).grpo.max_num_steps == value


def test_division_of_a_float_is_the_usual_one() -> None:
    cfg = load_config(DEMO, ["policy.optimizer.adam_eps='${div:${.lr},4}'"])
    assert cfg.policy.optimizer.adam_eps == 2.5e-4


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("${div:7,2}", "is not an integer; 2 must divide 7"),
        ("${div:7,0}", "divides by zero"),
        ("${sub:1,2,3}", "takes 2 numbers, not 3"),
        ("${mul:2,grpo.seed}", "takes numbers, not 'grpo.seed'"),
        ("${grpo.sed}", "Interpolation key 'grpo.sed' not found"),
        ("${pow:2,3}", "pow"),
    ],
)
def test_an_interpolation_that_fails_names_key_expression_and_reason(
    resolved_demo: Path, expression: str, reason: str
) -> None:
    message = problems(resolved_demo, f"grpo.max_num_steps={expression}")
    assert f"grpo.max_num_steps={expression} cannot be resolved" in message
    assert reason in message


def test_an_interpolation_of_the_wrong_type_is_found_after_resolving() -> None:
    message = problems(DEMO, "grpo.max_num_steps=${policy.optimizer.lr}")
    assert "grpo.max_num_steps=0.001 must be an integer" in message
    assert "argument 'grpo.max_num_steps=${policy.optimizer.lr}'" in message


def test_a_variable_of_ones_own_is_used_in_several_places(write: Write) -> None:
    path = write(
        "mine.yaml",
        """
defaults: [grpo_arithmetic_cpu]
vars: {prompts: 64, updates: 8}
grpo: {num_prompts_per_step: "${vars.prompts}"}
policy: {train_global_batch_size: "${div:${mul:${vars.prompts},8},${vars.updates}}"}
""",
    )
    cfg = load_config(path, ["vars.prompts=32"])
    assert (cfg.grpo.num_prompts_per_step, cfg.policy.train_global_batch_size) == (32, 32)
    assert cfg.vars == {"model_seed": 1, "prompts": 32, "updates": 8}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("grpo.seed", "7", 7),
        ("policy.optimizer.lr", "3e-4", 3e-4),
        ("grpo.val_at_start", "false", False),
        ("loss_fn.ratio_clip_c", "null", None),
        ("policy.device", "cpu", Device.cpu),
        ("logger.run_name", "007", "007"),
        ("logger.trace_steps", "[1, 2]", [1, 2]),
    ],
)
def test_an_environment_variable_has_the_type_of_its_key(
    monkeypatch: pytest.MonkeyPatch, key: str, text: str, value: object
) -> None:
    monkeypatch.setenv("OWN_VARIABLE", text)
    cfg = load_config(DEMO, [f"{key}=${{oc.env:OWN_VARIABLE}}"])
    found: object = attrgetter(key)(cfg)
    kind = ReferringText if isinstance(value, str) else type(value)
    assert found == value and type(found) is kind
    through = load_config(DEMO, ["vars.own=${oc.env:OWN_VARIABLE}", f"{key}=${{vars.own}}"])
    assert attrgetter(key)(through) == value


def test_an_environment_variable_of_another_type_or_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_VARIABLE", "many")
    assert "grpo.seed='many' must be an integer" in problems(DEMO, "grpo.seed=${oc.env:OWN_VARIABLE}")
    monkeypatch.delenv("OWN_VARIABLE")
    message = problems(DEMO, "grpo.seed=${oc.env:OWN_VARIABLE}")
    assert "Environment variable 'OWN_VARIABLE' not found" in message


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**31), st.floats(1e-9, 1e3), st.text("abcdefghijklmnop_/.-0123456789", min_size=1))
def test_values_given_as_arguments_arrive_unchanged(
    resolved_demo: Path, seed: int, lr: float, name: str
) -> None:
    arguments = [f"grpo.seed={seed}", f"policy.optimizer.lr={lr!r}", f"logger.run_name='{name}'"]
    cfg = load_config(resolved_demo, arguments)
    assert (cfg.grpo.seed, cfg.policy.optimizer.lr, cfg.logger.run_name) == (seed, lr, name)
