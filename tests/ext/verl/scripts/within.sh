# A shell within: of bash -c, of a here document, of a file that is written first.
cat > inner.sh <<EOF
exec python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=\$((2 + 3)) data.home=$HOME data.given="\$1"
EOF
bash inner.sh "a b"
bash <<'EOF'
N=6
python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$N data.x=here
EOF
bash -c 'python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=7 "data.x=$1" "$@"' name "c d" data.y=e
