export ACCELERATE_LOG_LEVEL=info
torchrun --nproc_per_node=4 grpo.py \
    --model_name_or_path meta-llama/Llama-3.1-8B-Instruct \
    --dataset_name trl-lib/tldr --reward_funcs accuracy_reward \
    --use_peft --lora_r 32 --lora_alpha 64 --lora_dropout 0.0 --lora_target_modules q_proj k_proj v_proj o_proj \
    --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --num_generations 8 \
    --max_completion_length 512 --learning_rate 5e-5 --max_steps 200 --use_vllm \
    --gradient_checkpointing True --bf16 True 2>&1 | tee train.log
