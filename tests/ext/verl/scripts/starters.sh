# Programs that start programs, and ways around a function of the same name.
PYTHON=${PYTHON:-$(which python3)}
echo actor_rollout_ref.rollout.n=1 data.x=2 | xargs python3 -m verl.trainer.main_ppo
command python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=2
python3() { command python3 -u "$@"; }
python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=3
ARGS='data.a="x y" data.b=3'
eval "\"$PYTHON\" -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4 $ARGS"
