# Logs, background jobs and pipes.
set -euo pipefail
mkdir -p logs
nohup env HYDRA_FULL_ERROR=1 timeout 3600 python3 -m recipe.dapo.main_dapo actor_rollout_ref.rollout.n=3 data.x="a b" \
  > logs/train.log 2>&1 &
wait
