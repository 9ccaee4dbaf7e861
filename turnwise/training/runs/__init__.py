"""One training run over its life: prepared, opened, checkpointed, resumed, trusted."""
