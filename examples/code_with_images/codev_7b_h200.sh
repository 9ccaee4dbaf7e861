#!/usr/bin/env bash
# Qwen2.5-VL-7B-Instruct learns to code with images on eight H200. Settings: codev_7b.yaml and h200.yaml.
#
#   codev_7b_h200.sh [--dry-run] [--save-path DIR] [key=value ...]
#
# Set these to your machine's; docs/environment.md says what each does.
set -euo pipefail
export BASE_MODEL_PATH="${BASE_MODEL_PATH:-${VLLM_MODEL_PATH:-Qwen/Qwen2.5-VL-7B-Instruct}}" # a folder or a hub id
export DATA_REPO="${DATA_REPO:-data/code_with_images}"           # has train.jsonl, test.jsonl and their images
export LLM_AS_A_JUDGE_BASE="${LLM_AS_A_JUDGE_BASE:-http://127.0.0.1:18901/v1}" # several: comma separated
export WANDB_PROJECT="${WANDB_PROJECT:-code_with_images}"        # WANDB_ENTITY and WANDB_API_KEY as wandb has them
# DATA_CACHE, HF_HOME and VLLM_MODEL_PATH are read as they are set.
exec "${PYTHON:-python}" "$(dirname "$0")/launch.py" h200 "$@"
