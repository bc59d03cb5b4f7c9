#!/usr/bin/env bash
# From nothing to a trained model: set-up, the tiny checkpoint, then the main job.
# Arguments go to run_grpo.py, for example: scripts/demo.sh grpo.seed=2
# With --experts first the model that learns to add is a mixture of experts. With --images first a tiny
# vision-language model learns to count circles instead. With --distill a larger model that can add teaches.
# With --agent an agent, which calls the policy as it would call OpenAI, trains it to use a calculator.
set -euo pipefail
cd "$(dirname "$0")/.."

CONFIG=configs/grpo_arithmetic_cpu.yaml
EXPERTS=0
case ${1:-} in
    --images) CONFIG=configs/grpo_shapes_vlm_cpu.yaml && shift ;;
    --distill) CONFIG=configs/distill_arithmetic_cpu.yaml && shift ;;
    --agent) CONFIG=configs/grpo_agent_cpu.yaml && shift ;;
    --experts) CONFIG=configs/grpo_arithmetic_moe_cpu.yaml && EXPERTS=8 && shift ;;
esac
readonly CONFIG EXPERTS

# vLLM's build for GPUs does not run on CPUs: beside an environment for GPUs the demo has one of its own.
VENV=.venv
if [[ -f .venv/for_gpus ]]; then VENV=.venv-cpu; fi
export VENV
bash scripts/setup.sh

# A mistake in the arguments shows before the model is made.
resolved=$("$VENV/bin/python" run_grpo.py --config "$CONFIG" --cfg "$@")
value_of() { awk -v key="$1" '$1 == key":" { print $2; exit }' <<<"$resolved"; }

# True for a model that is not there, and for one that the scripts made: they tell whether it is what they make.
is_to_make() { [[ ! -d $1 || -f $1/warm_start.json ]]; }

model=$(value_of model_name)
if [[ $CONFIG == *shapes* ]]; then
    "$VENV/bin/python" scripts/prepare_shapes.py \
        --output "$model" --data "$(value_of shapes)" --seed "$(value_of model_seed)"
elif [[ $CONFIG == *agent* ]]; then
    "$VENV/bin/python" scripts/prepare_sums.py \
        --output "$model" --data "$(value_of problems)" --seed "$(value_of model_seed)"
elif is_to_make "$model"; then
    "$VENV/bin/python" scripts/prepare_arithmetic.py \
        --output "$model" --digits "$(value_of digits)" --seed "$(value_of model_seed)" --experts "$EXPERTS"
fi
if [[ $CONFIG == *distill* ]]; then
    teacher=$(awk '/^teacher:/ { inside = 1 } inside && $1 == "model_name:" { print $2; exit }' <<<"$resolved")
    if is_to_make "$teacher"; then
        "$VENV/bin/python" scripts/prepare_arithmetic.py --output "$teacher" --digits "$(value_of digits)" \
            --seed "$(value_of model_seed)" --hidden-size 192 --accuracy 0.97
    fi
fi
exec "$VENV/bin/python" run_grpo.py --config "$CONFIG" "$@"
