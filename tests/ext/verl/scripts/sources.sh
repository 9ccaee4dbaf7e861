# Files beside it.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/settings.env"
. "$HERE/settings.env"
python3 -m verl.trainer.main_ppo "${FROM_FILE[@]}" actor_rollout_ref.model.path=$MODEL_FROM_FILE
