# Arithmetic, nested defaults and what parameters can do.
set -x
MAX_PROMPT=$((1024 * 8))
MAX_RESPONSE=$(( MAX_PROMPT / 4 ))
((TOTAL = MAX_PROMPT + MAX_RESPONSE))
MODEL_ID=${MODEL_ID:-Qwen/Qwen3-0.6B}
MODEL=${MODEL_PATH:-"${MODELS_FOLDER:-/models}/${MODEL_ID##*/}"}
: "${SAVE_TO:=/out/$(basename "${MODEL_ID,,}")}"
python3 -m verl.trainer.main_ppo data.max_prompt_length=$MAX_PROMPT data.max_response_length=${MAX_RESPONSE} \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((TOTAL * 2)) actor_rollout_ref.model.path="$MODEL" \
  trainer.default_local_dir=$SAVE_TO trainer.where="$(pwd)/x" trainer.home=~/y trainer.home2=$HOME/z \
  trainer.beside="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/tools.yaml" trainer.name=$(basename "$0" .sh)
