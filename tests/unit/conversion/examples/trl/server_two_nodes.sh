#!/bin/bash
#SBATCH --nodes=3
#SBATCH --gres=gpu:8
NODELIST=($(scontrol show hostnames $SLURM_JOB_NODELIST))
TRAIN_NODES="${NODELIST[@]:0:2}"
VLLM_NODE="${NODELIST[2]}"
srun --nodes=2 --ntasks=2 --nodelist="$TRAIN_NODES" accelerate launch \
    --config_file deepspeed_zero3.yaml --num_processes 16 --num_machines 2 \
    --machine_rank $SLURM_PROCID --rdzv_backend c10d \
    train_grpo.py --config server_two_nodes.yaml --vllm_server_host $VLLM_NODE
