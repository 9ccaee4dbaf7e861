#!/bin/bash
# if, case, loops and functions decide.
set -eu
BACKEND=${BACKEND:-fsdp}
if [ "$BACKEND" = megatron ]; then
  STRATEGY=megatron; LR=1e-6
elif [[ -z "${NEVER_SET_HERE:-}" ]]; then
  STRATEGY=fsdp; LR=2e-6
else
  STRATEGY=other; LR=3e-6
fi
case "$STRATEGY" in
fsdp*) OFFLOAD=True ;;
*) OFFLOAD=False ;;
esac
WORDS=()
for turn in 1 2 3; do
  WORDS+=("data.turn_$turn=$((turn * 10))")
done
add() { local name=$1; WORDS+=("$name=$2"); }
add data.by_function yes
if python3 -c 'import no_such_module_here' 2>/dev/null; then DEVICE=npu; else DEVICE=gpu; fi
python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=$STRATEGY actor_rollout_ref.actor.optim.lr=$LR \
  actor_rollout_ref.offload=$OFFLOAD trainer.device=$DEVICE "${WORDS[@]}"
