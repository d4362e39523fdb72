#!/usr/bin/env bash
# Train on several machines that reach each other by ssh without a password.
#
#   launch/multinode.sh HOSTFILE --config C.yaml [--deepspeed_config D.json] [key.sub=value ...]
#
# HOSTFILE has a line `NAME slots=GPUS` per machine; rank 0, which writes metrics and the W&B run, is on the first. All need
# this repository at the same path, the same environment, and a shared file system for the run folder. The launcher
# forwards few variables: put `WANDB_API_KEY=...` and the like, a line each, into the file .deepspeed_env of your home
# folder on the machine where you start this.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    sed -n 's/^# \{0,1\}//; 2,4p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
hostfile=$1
shift
exec deepspeed --hostfile "$hostfile" "$(dirname "${BASH_SOURCE[0]}")/train.py" "$@"
