# Several words in one text, split by the shell; values with spaces, dollars, line breaks and the word python.
COMMON="data.train_batch_size=8 data.max_prompt_length=64"
COMMON+=" data.shuffle=False"
python -u -m verl.trainer.main_ppo $COMMON \
  actor_rollout_ref.model.path=tiny \
  data.system_prompt="Use python to check; then answer. bash -c is not needed" \
  data.second=$'two\nlines' 'data.third=${data.train_batch_size}' data.fourth=\${data.max_prompt_length} \
  data.empty= data.list=[1,2] data.braces={a:1} trainer.logger='["console","wandb"]' ++data.forced=1 +data.added=2 ~data.gone
