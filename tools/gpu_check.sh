#!/usr/bin/env bash
# Check this project on one NVIDIA GPU, without a network, in under eight minutes.
#
#   tools/gpu_check.sh [--wheels DIR]
#
# Kernels against float64, a whole step against dense, speed, and peak memory against the planner at 32K to 256K tokens;
# prints one table, and ends with 0 when every line of it is within its limit. --wheels DIR makes .venv from the wheels in
# DIR alone; without it .venv of `make setup` is used, or the python3 in PATH where there is none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} == --wheels && -d ${2:-} && $# -eq 2 ]]; then
    wheels=$2
elif [[ $# -eq 0 ]]; then
    wheels=
else
    sed -n 's/^# \{0,1\}//; 2,8p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
if ! nvidia-smi -L >/dev/null 2>&1; then
    echo "gpu_check: nvidia-smi finds no NVIDIA GPU on this machine; run it on one that has" >&2
    exit 1
fi
if [[ -n $wheels ]]; then
    python3 -m venv .venv
    .venv/bin/python -m pip install --quiet --no-index --find-links "$wheels" setuptools wheel
    .venv/bin/python -m pip install --quiet --no-index --find-links "$wheels" --no-build-isolation -e ".[dev]"
fi
python=python3
if [[ -x .venv/bin/python ]]; then
    python=.venv/bin/python
fi
export PYTHONPATH=$PWD
exec timeout 480 "$python" tools/gpu_check.py
