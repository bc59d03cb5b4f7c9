#!/bin/bash
MODEL=${1:-Qwen/Qwen2.5-7B-Instruct}
accelerate launch \
    --config_file configs/zero3.yaml \
    --num_processes 8 \
    --mixed_precision bf16 \
    examples/scripts/grpo_math.py \
    --model_name_or_path $MODEL \
    --dataset_name AI-MO/NuminaMath-TIR \
    --dataset_train_split "train[:5%]" \
    --reward_funcs accuracy_reward think_format_reward \
    --output_dir $HOME/runs/grpo-numina \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant_with_warmup \
    --warmup_steps 20 \
    --gradient_checkpointing \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 8 \
    --num_generations 16 \
    --max_prompt_length 1024 \
    --max_completion_length 1024 \
    --use_vllm \
    --vllm_mode colocate \
    --vllm_gpu_memory_utilization 0.35 \
    --max_steps 300 \
    --save_strategy no \
    --report_to none
