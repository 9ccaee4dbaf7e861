"""What people call our keys who come from elsewhere: an unknown key is answered with what stands for it here."""

import difflib
from collections.abc import Iterable

_LEARNING_RATE = "learner.lr (in `turnwise sft` sft.lr)"
_BATCH = "training.groups samples of training.group_size episodes (in `turnwise sft` sft.batch_tokens)"
_PASS = "learner.token_budget: a batch is split into as many passes as it needs"  # no password
_TRIES = "training.group_size (of evaluations eval.group_size)"
_ANSWER = "sampling.max_tokens, of one turn (rollout.max_tokens is an episode's)"
_STEPS = "training.steps (in `turnwise sft` sft.steps)"
_WARMUP = "learner.warmup, in updates (in `turnwise sft` sft.warmup)"
_MODEL = "model.path"
_TRAIN, _HELD_OUT = "data.train_files=[FILE] or [hf://datasets/OWNER/NAME/FILE]", "data.eval_files=[FILE]"
_FOLDER = "run=NAME, a folder of runs_dir"
_PRECISION = "learner.precision, and model.precision of the sampler"
_SCORER = "scoring.scorers={default: FILE.py:FUNCTION}"

BROUGHT = {
    "learning_rate": _LEARNING_RATE, "lr": _LEARNING_RATE, "actor_lr": _LEARNING_RATE,
    "batch_size": _BATCH, "train_batch_size": _BATCH, "per_device_train_batch_size": _BATCH,
    "generation_batch_size": _BATCH, "rollout_batch_size": _BATCH, "global_batch_size": _BATCH,
    "micro_batch_size": _PASS, "gradient_accumulation_steps": _PASS,
    "n": _TRIES, "num_generations": _TRIES, "num_return_sequences": _TRIES, "num_samples": _TRIES,
    "rollouts_per_example": _TRIES, "samples_per_prompt": _TRIES, "n_samples_per_prompt": _TRIES,
    "temperature": "sampling.temperature (of evaluations eval.sampling.temperature)",
    "max_new_tokens": _ANSWER, "max_completion_length": _ANSWER, "max_response_length": _ANSWER,
    "max_completion_tokens": _ANSWER, "response_length": _ANSWER,
    "max_prompt_length": "data.max_prompt_tokens", "prompt_length": "data.max_prompt_tokens",
    "max_length": "data.max_prompt_tokens and rollout.max_tokens",
    "max_seq_length": "data.max_prompt_tokens and rollout.max_tokens",
    "max_model_len": "data.max_prompt_tokens and rollout.max_tokens",
    "max_turns": "rollout.max_assistant_turns", "num_turns": "rollout.max_assistant_turns",
    "max_steps": _STEPS, "num_steps": _STEPS, "total_steps": _STEPS, "num_train_epochs": _STEPS,
    "warmup_steps": _WARMUP, "num_warmup_steps": _WARMUP, "warmup_ratio": _WARMUP,
    "max_grad_norm": "learner.grad_clip", "lora_r": "learner.lora_rank", "beta": "algorithm.kl_loss",
    "kl_coef": "algorithm.kl_loss", "epsilon": "algorithm.clip_low and algorithm.clip_high",
    "cliprange": "algorithm.clip_low and algorithm.clip_high", "loss_type": "algorithm.loss",
    "adv_estimator": "algorithm.advantage",
    "model_name": _MODEL, "model_name_or_path": _MODEL, "model_path": _MODEL, "model_id": _MODEL,
    "train_dataset": _TRAIN, "dataset_name": _TRAIN, "train_file": _TRAIN,
    "eval_dataset": _HELD_OUT, "val_files": _HELD_OUT, "eval_file": _HELD_OUT,
    "output_dir": _FOLDER, "save_dir": _FOLDER, "run_name": _FOLDER, "experiment_name": _FOLDER,
    "save_steps": "training.save_every", "eval_steps": "training.eval_every",
    "report_to": "tracking.to", "logger": "tracking.to",
    "bf16": _PRECISION, "fp16": _PRECISION, "dtype": _PRECISION, "torch_dtype": _PRECISION,
    "reward_funcs": _SCORER, "reward_function": _SCORER, "reward_fn": _SCORER,
    "max_concurrency": "rollout.concurrency", "num_workers": "rollout.concurrency",
    "api_base": "engine.base_url", "api_key": "nothing; the key is read from the environment as OPENAI_API_KEY",
}  # fmt: skip
"""By the name itself, or by the last part of a longer one: `sampling.n` is answered as `n` is."""


def equivalent(key: str, ours: Iterable[str]) -> str | None:
    """What stands here for a name from elsewhere; not for a key of ours whose section is spelt a little wrong."""
    section, _, last = key.rpartition(".")
    sections = [name.removesuffix(f".{last}") for name in ours if name.endswith(f".{last}")]
    return None if difflib.get_close_matches(section, sections) else BROUGHT.get(last)
