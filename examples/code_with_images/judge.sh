#!/usr/bin/env bash
# Serve a vision model as the judge, under the name that codev_7b.yaml asks for; needs vLLM and GPUs.
#
#   judge.sh [options of vllm serve ...]          JUDGE_MODEL, JUDGE_PORT, JUDGE_GPUS, VLLM_API_KEY
#
# Start one for each machine and name them all: LLM_AS_A_JUDGE_BASE=http://a:18901/v1,http://b:18901/v1
set -euo pipefail
exec vllm serve "${JUDGE_MODEL:-Qwen/Qwen2.5-VL-32B-Instruct}" \
  --port "${JUDGE_PORT:-18901}" \
  --tensor-parallel-size "${JUDGE_GPUS:-8}" \
  --served-model-name judge \
  --max-model-len 32768 \
  --gpu-memory-utilization 0.8 \
  --limit-mm-per-prompt '{"image": 8}' \
  "$@"
