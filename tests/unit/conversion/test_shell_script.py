"""Scripts in the style of verl's examples, and the arguments that they give to its trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.config.other_frameworks import Missing, NoEffect, table_of
from nemo_like.config.problems import ConfigError
from nemo_like_tools.conversion.shell_script import Script, read_script
from nemo_like_tools.conversion.their_files import read_theirs
from nemo_like_tools.conversion.translation import Conversion, convert_configuration, framework_of
from nemo_like_tools.conversion.values import Theirs
from nemo_like_tools.conversion.writing import conversion_yaml


def script(tmp_path: Path, text: str) -> Script:
    path = tmp_path / "run.sh"
    path.write_text(text)
    return read_script(path)


def read(tmp_path: Path, text: str, *arguments: str) -> tuple[Theirs, str]:
    path = tmp_path / "run.sh"
    path.write_text(text)
    theirs, problems = read_theirs(path, arguments)
    return theirs, "\n".join(map(str, problems))


def test_the_words_of_the_call_are_arguments_with_variables_put_in(tmp_path: Path) -> None:
    text = """#!/usr/bin/env bash
# it's a comment with an apostrophe
set -xeuo pipefail
export MODEL=${MODEL:-Some/Model-1B}
files="['$HOME/a.parquet', '$HOME/b.parquet']"
prompt=$((1024 * 2)); response=$((prompt * 4 + 1))  # arithmetic
MODE=1 python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer' \\
    data.train_files="$files" \\
    data.max_prompt_length=${prompt} \\
    data.max_response_length=$response \\
    +data.one='a b' \\
    actor_rollout_ref.model.path=$MODEL \\
    trainer.logger='["console","wandb"]' "$@" 2>&1 | tee log.txt
"""
    found = script(tmp_path, text)
    assert found.arguments == [
        "data.train_files=['@HOME@/a.parquet', '@HOME@/b.parquet']",
        "data.max_prompt_length=2048",
        "data.max_response_length=8193",
        "+data.one=a b",
        "actor_rollout_ref.model.path=Some/Model-1B",
        'trainer.logger=["console","wandb"]',
    ]
    assert found.options == {"config_name": ["ppo_megatron_trainer"]}
    assert not found.unknown


def test_an_array_is_its_words_and_a_document_is_no_command(tmp_path: Path) -> None:
    text = """DATA=(
    # it's here
    data.train_batch_size=8
    data.prompt_key="my prompt"
)
DATA+=(data.shuffle=True)
more="data.a=1 data.b=2"
cat > x <<EOF
python3 -m verl.trainer.main_ppo data.seed=3
EOF
python3 -m verl.trainer.main_ppo "${DATA[@]}" $more
"""
    assert script(tmp_path, text).arguments == [
        "data.train_batch_size=8",
        "data.prompt_key=my prompt",
        "data.shuffle=True",
        "data.a=1",
        "data.b=2",
    ]


def test_conditions_loops_and_functions_mean_what_they_mean_to_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """set -euo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case "$DEVICE" in
    gpu) tp=2; EXTRA=(data.seed=3) ;;
    *) echo "no $DEVICE" >&2; exit 1 ;;
esac
if (( NODES > 1 )); then EXTRA+=(trainer.nnodes=$NODES); fi
files=""
for name in a b; do files+="$name.parquet,"; done
length() { echo $(( $1 * 1024 )); }
mkdir -p "$HOME/logs" && cd "$HOME"
LAUNCH=(uv run /opt/venv/bin/python3)
"${LAUNCH[@]}" -m verl.trainer.main_ppo data.train_files="[${files%,}]" \\
    data.max_prompt_length=$(length 2) actor_rollout_ref.rollout.tensor_model_parallel_size=$tp \\
    "${EXTRA[@]}" >"$HOME/logs/run.log" 2>&1
"""
    monkeypatch.setenv("NODES", "2")
    assert script(tmp_path, text).arguments == [
        "data.train_files=[a.parquet,b.parquet]",
        "data.max_prompt_length=2048",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "data.seed=3",
        "trainer.nnodes=2",
    ]


def test_a_script_starts_no_program_and_writes_no_file(tmp_path: Path) -> None:
    text = f"""touch {tmp_path}/touched
echo x > {tmp_path}/written
/bin/touch {tmp_path}/called || true
exec 3>{tmp_path}/opened || true
python3 -m verl.trainer.main_ppo data.seed=1
"""
    assert script(tmp_path, text).arguments == ["data.seed=1"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


def test_a_script_that_stops_before_the_call_says_why(tmp_path: Path) -> None:
    stop = '[ -n "${MODEL:-}" ] || { echo "no model" >&2; exit 1; }'
    with pytest.raises(ConfigError, match="bash ends with: no model; put NAME=VALUE of what"):
        script(tmp_path, f"{stop}\npython3 -m verl.trainer.main_ppo data.seed=1\n")


def test_the_launcher_and_the_options_of_a_call_are_read(tmp_path: Path) -> None:
    text = """accelerate launch --num-processes 4 --mixed_precision bf16 examples/my_grpo.py \\
    --model_name_or_path Some/Model-1B --reward_funcs a b --learning-rate=1e-6 --use_vllm
"""
    found = script(tmp_path, text)
    assert found.program == "examples/my_grpo.py"
    assert found.launcher == {"num_processes": ["4"]}
    assert found.options == {
        "model_name_or_path": ["Some/Model-1B"],
        "reward_funcs": ["a", "b"],
        "learning_rate": ["1e-6"],
        "use_vllm": [],
    }


UNKNOWN = """if [ "$N" -gt 4 ]; then tp=4; else tp=2; fi
name="run-$(date +%s)"
OPTIONS=($(cat options.txt))
python3 -m verl.trainer.main_ppo data.train_batch_size=8 trainer.nnodes=$NODES \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$tp trainer.experiment_name=$name "${OPTIONS[@]}"
"""


def test_what_only_a_shell_can_tell_is_named_with_a_remedy(tmp_path: Path) -> None:
    theirs, problems = read(tmp_path, UNKNOWN)
    assert theirs("data.train_batch_size") == 8
    assert theirs("trainer.nnodes") is None
    assert "trainer.nnodes=$NODES" in problems
    assert "$NODES, which the script does not set; add the argument trainer.nnodes=VALUE" in problems
    assert (
        "$N cannot be known without running the script: the script decides by it and does not set it"
        in problems
    )
    assert "put N=VALUE before the command" in problems
    assert "$(date +%s), the output of a command" in problems
    assert "$(cat options.txt), the output of a command; add its key=value arguments" in problems


def test_arguments_after_the_script_win_and_answer_what_is_unknown(tmp_path: Path) -> None:
    theirs, problems = read(tmp_path, UNKNOWN, "trainer.nnodes=3", "+data.train_batch_size=16")
    assert (theirs("trainer.nnodes"), theirs("data.train_batch_size")) == (3, 16)
    assert "trainer.nnodes" not in problems


def test_the_home_directory_stays_a_tilde(tmp_path: Path) -> None:
    theirs, _ = read(tmp_path, "python3 -m verl.trainer.main_ppo data.train_files=[$HOME/a,${HOME}/b]\n")
    assert theirs("data.train_files") == ["~/a", "~/b"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python3 train.py data.seed=1\n", "has no calls of a trainer"),
        ("python3 -m verl.trainer.main_ppo a=1\n" * 2, "has 2 calls of a trainer"),
    ],
)
def test_a_script_without_the_one_call_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        script(tmp_path, text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_script(tmp_path / "missing.sh")


CALL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=32 "


def converted(tmp_path: Path, text: str) -> Conversion:
    theirs, _ = read(tmp_path, text)
    return convert_configuration(framework_of(theirs.tree, None, "run.sh"), theirs, "run.sh")


def test_what_a_script_leaves_unsaid_has_verls_defaults_and_the_result_lists_them(tmp_path: Path) -> None:
    found = converted(tmp_path, f"{CALL} actor_rollout_ref.rollout.n=4 trainer.total_training_steps=3")
    values = {key: setting.value for key, setting in found.settings.items()}
    assert values["grpo.num_prompts_per_step"] == 32
    assert values["policy.train_global_batch_size"] == 1024  # 256 prompts of 4 samples
    assert values["policy.max_total_sequence_length"] == 1024  # 512 of a prompt, 512 of a response
    assert (values["policy.data_parallel_size"], values["generation.num_engines"]) == (8, 4)
    assert (values["policy.backend"], values["loss_fn.ratio_clip_c"]) == ("fsdp", 3.0)
    assert not [key for key in values if key.startswith("value.")]  # of the critic, which grpo has not
    assert found.assumed["data.max_prompt_length"] == 512
    assert not {"data.train_batch_size", "actor_rollout_ref.rollout.n", "critic.ppo_epochs"} & {
        *found.assumed
    }
    text = conversion_yaml(found, "verl", "run.sh")
    assert text.startswith("# From run.sh of verl by")
    assert "\n#   data.max_prompt_length=512\n" in text
    assert "data_parallel_size: 8 # trainer.n_gpus_per_node by default\n" in text


@pytest.mark.parametrize("choice", ["--config-name=ppo_megatron_trainer.yaml", "model_engine=megatron"])
def test_a_configuration_for_megatron_has_its_defaults(tmp_path: Path, choice: str) -> None:
    size = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"
    found = converted(tmp_path, f"{CALL} {choice} {size}")
    assert found.settings["policy.backend"].value == "megatron"
    assert found.settings["policy.data_parallel_size"].value == 4  # 8 GPUs in replicas of 2 stages
    assert "policy.fsdp_cfg.cpu_offload" not in found.settings


def test_a_value_that_cannot_be_known_gets_no_default(tmp_path: Path) -> None:
    found = converted(tmp_path, f"{CALL} actor_rollout_ref.actor.grad_clip=$CLIP")
    assert "policy.max_grad_norm" not in found.settings


def test_every_default_is_of_a_key_that_the_table_leads_somewhere() -> None:
    verl = table_of("verl")
    nowhere = [key for key in verl.defaults if isinstance(verl.keys.get(key), NoEffect | Missing | None)]
    assert not nowhere
