#!/usr/bin/env bash
# Speed and memory of ragkv beside plain transformers on one GPU, with random weights of 8B shape; prints one JSON object.
# Needs a clone of this repository and a Python with torch and transformers ($PYTHON, else python3), nothing else.
# Takes less than 8 minutes. `evals/gpu_check.sh --tiny` runs the same code on the CPU with a tiny shape.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root:$root/evals${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m ragkv_evals.gpu_check --root "$root" "$@"
