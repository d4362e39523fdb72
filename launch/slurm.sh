#!/usr/bin/env bash
#SBATCH --job-name=megatron-branch
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# Train under Slurm, from the root of the repository with its environment active:
#
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh --config C.yaml [--deepspeed_config D.json] [key.sub=value ...]
#
# One task per machine starts that machine's ranks; no ssh is needed, and Slurm carries the environment (WANDB_*) along.
set -euo pipefail

: "${SLURM_JOB_NODELIST:?start this with sbatch}"
: "${SLURM_GPUS_ON_NODE:?ask for GPUs with --gpus-per-node}"
hostfile=$(mktemp "$PWD/.hosts.XXXXXX")
trap 'rm -f "$hostfile"' EXIT
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/ slots=$SLURM_GPUS_ON_NODE/" >"$hostfile"
first=$(head -n 1 "$hostfile")
export HOSTFILE=$hostfile MASTER=${first%% *} PORT=$((20000 + SLURM_JOB_ID % 20000))

# shellcheck disable=SC2016  # expanded on each machine
srun bash -c 'exec deepspeed --hostfile "$HOSTFILE" --no_ssh --node_rank "$SLURM_NODEID" --master_addr "$MASTER" \
    --master_port "$PORT" launch/train.py "$@"' train "$@"
