accelerate launch --num_processes 8 examples/scripts/grpo_vlm.py \
    --model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct --output_dir grpo-vlm \
    --dataset_name lmms-lab/multimodal-open-r1-8k-verified --reward_funcs accuracy_reward \
    --learning_rate 1e-5 --dtype bfloat16 --max_prompt_length 2048 --max_completion_length 1024 \
    --use_vllm --vllm_mode colocate --vllm_importance_sampling_correction False \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_generations 8 --max_steps 100
