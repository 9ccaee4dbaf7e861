#!/usr/bin/env bash
# Arrays that grow, that hold parentheses, quotes and comments, and that stay empty.
set -xeuo pipefail
DATA=(
    data.train_batch_size=64   # a comment (with parentheses)
    "data.train_files=['a.parquet', 'b (1).parquet']"
    'data.prompt_key=prompt'
)
DATA+=(data.max_prompt_length=256 "data.note=it's (here)")
ACTOR=()
ACTOR+=(actor_rollout_ref.actor.optim.lr=5e-6)
ACTOR+=("actor_rollout_ref.actor.ppo_mini_batch_size=32")
EXTRA=()
declare -A SIZES=([small]=2 [large]=8)
python3 -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" ${EXTRA[@]+"${EXTRA[@]}"} "${EXTRA[@]}" \
    actor_rollout_ref.rollout.n="${SIZES[large]}" actor_rollout_ref.model.tags="[$(IFS=,; echo "${!SIZES[*]}" | tr ' ' ',')]" "$@"
