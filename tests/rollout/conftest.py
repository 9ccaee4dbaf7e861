"""Episodes over a scripted sampler, as `scripted_rollout.py` plays them."""

from scripted_rollout import call, one, renderer, rollouts, run, sample, tokenizer_folder

__all__ = ["call", "one", "renderer", "rollouts", "run", "sample", "tokenizer_folder"]
