# What starts the program: several launches, wrappers and shells within.
pip install --quiet something
huggingface-cli download some/model
sleep 1000
python3 examples/prepare.py --out data
torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=tiny data.train_files=sft.parquet
uv run --with verl python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=1 data.x=first
ray job submit --address=http://127.0.0.1:8265 --runtime-env=env.yaml --no-wait -- \
  python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=2 data.x="second one"
python3 -m verl.model_merger merge --backend fsdp
