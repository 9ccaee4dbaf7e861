#!/usr/bin/env bash
# Qwen2.5-VL-7B-Instruct learns to code with images on the machines of a profile (h200, l40s or ray: the YAML files beside
# this one). codev_7b_h200.sh, codev_7b_l40s.sh and codev_7b_ray.sh name theirs.
#
#   codev_7b.sh PROFILE [--dry-run] [--save-path DIR] [key=value ...]
#
# Set these to your machine's; docs/environment.md says what each does.
set -euo pipefail
export BASE_MODEL_PATH="${BASE_MODEL_PATH:-${VLLM_MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}}" # a folder or a hub id
export VLLM_MODEL_PATH="${VLLM_MODEL_PATH:-$BASE_MODEL_PATH}"    # what the rollout workers open: the same model
export DATA_REPO="${DATA_REPO:-data/code_with_images}"           # has train.jsonl, test.jsonl and their images
export DATA_CACHE="${DATA_CACHE:-$DATA_REPO}"                    # looked in after DATA_REPO
export HF_HOME="${HF_HOME:-$HOME/.cache/huggingface}"            # models and datasets of the hub
export LLM_AS_A_JUDGE_BASE="${LLM_AS_A_JUDGE_BASE:-http://127.0.0.1:18901/v1}" # several: comma separated
export WANDB_PROJECT="${WANDB_PROJECT:-code_with_images}"        # WANDB_ENTITY and WANDB_API_KEY as wandb has them
exec "${PYTHON:-python}" "$(dirname "$0")/launch.py" "$@"
