# Variables that nobody sets: they are named, and do not change what depends on their being empty.
if [ -z "$NOBODY_SETS_DATA" ]; then SIZE=16; else SIZE=99; fi
FILES=$NOBODY_SETS_DATA/train.parquet
python3 -m verl.trainer.main_ppo data.train_files=$FILES data.train_batch_size=$SIZE \
  actor_rollout_ref.model.path=${NOBODY_SETS_MODEL} data.val_files="${NOBODY_SETS_MODEL:-none}"
