#!/usr/bin/env bash
set -xeuo pipefail

DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case "$DEVICE" in
    gpu) tp=2; util=0.6 ;;
    npu) tp=4; util=0.3 ;;
    *) echo "no device $DEVICE" >&2; exit 1 ;;
esac

DATA=(
    data.train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
    data.val_files="['$HOME/data/gsm8k/test.parquet', '$HOME/data/math/test.parquet']"
    data.train_batch_size=512
    data.max_prompt_length=1024
    data.max_response_length=2048
)
ACTOR=(
    actor_rollout_ref.model.path=${MODEL_PATH:-Qwen/Qwen3-8B}
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=0.0003
    actor_rollout_ref.actor.clip_ratio_high=0.0004
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=$tp
    actor_rollout_ref.rollout.gpu_memory_utilization=$util
)
EXTRA=()
if [ "${NNODES:-1}" -gt 1 ]; then
    EXTRA+=(trainer.balance_batch=True)
fi

python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${EXTRA[@]}" \
    trainer.n_gpus_per_node=8 trainer.nnodes=${NNODES:-1} trainer.total_training_steps=300 \
    trainer.logger=console "$@" 2>&1 | tee gspo.log
