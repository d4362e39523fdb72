#!/usr/bin/env bash
# Train on this machine, on its GPUs or, where there is none, on its CPUs.
#
#   launch/local.sh RANKS --config C.yaml [--deepspeed_config D.json] [key.sub=value ...]
set -euo pipefail

if [[ $# -lt 2 ]]; then
    sed -n 's/^# \{0,1\}//; 2,4p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
ranks=$1
shift
if ! nvidia-smi >/dev/null 2>&1; then
    export DS_ACCELERATOR=cpu
fi
exec deepspeed --log_level warning --num_accelerators "$ranks" "$(dirname "${BASH_SOURCE[0]}")/train.py" "$@"
