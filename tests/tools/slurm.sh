#!/bin/bash
#SBATCH --nodes 2 --ntasks-per-node 1 --gpus-per-node 8 --exclusive
#SBATCH --time 24:00:00 --signal TERM@600
# Train 1.3 billion parameters on two nodes. From the folder of hybrid.py:
#     sbatch tests/tools/slurm.sh DATA DIR
# Submitted again, it continues. DIR is a folder that all nodes share; DATA is the same on each.
# On more nodes, --batch-size must be divisible by 16 x nodes. Slurm sends SIGTERM 600 seconds before
# --time is over. torchrun then waits 600 seconds for the save, but with torch 2.11, which has no
# --shutdown-timeout, only 30. Add your cluster's --account and --partition, and activate the
# environment of torch before you submit.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE  # or srun may give torchrun only one of them
head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
[[ $(torchrun --help) == *--shutdown-timeout* ]] && shutdown="--shutdown-timeout 600"
srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-id $SLURM_JOB_ID --rdzv-backend c10d \
    --rdzv-endpoint $head:29500 $shutdown hybrid.py --data "$1" --checkpoint "$2" \
    --save-every 500 --dtype bf16 --zero 1 --layers 24 --hidden 2048 --heads 16 --seq-len 2048 \
    --vocab-size 50304 --batch-size 128 --microbatches 2 --lr 2e-4 --steps 20000
