"""The smaller rules of verl's config: values that must be verl's usual ones, and keys that another key switches off."""

from collections.abc import Mapping
from typing import Any

from turnwise.data.files import Split, data_files
from turnwise.data.rows import read_rows
from turnwise.errors import TurnwiseError
from turnwise.ext.verl.translation.values import ACTOR, GROUPS, MODEL, ROLLOUT, Flat, Rule, Unsupported, to

OPTIM, MODE = f"{ACTOR}.optim", f"{ACTOR}.policy_loss.loss_mode"
SYNC = ("sync", None)
NODES, GPUS = "cluster=ray takes the nodes that there are", "learner.processes and servers.replicas take a GPU each"
SWITCHES: dict[str, tuple[str, tuple[Any, ...]]] = {
    f"{ACTOR}.policy_loss.": (MODE, ("vanilla", "gspo", "cispo", None)),
    f"{ACTOR}.tau_": (MODE, ("vanilla", "gspo", "cispo", None)),
    f"{ACTOR}.qat.": (f"{ACTOR}.qat.enable", (False, None)),
    f"{MODEL}.lora.": (f"{MODEL}.lora.rank", (0, None)),
    f"{MODEL}.tiled_mlp.": (f"{MODEL}.tiled_mlp.enabled", (False, None)),
    f"{OPTIM}.num_cycles": (f"{OPTIM}.lr_scheduler_type", ("constant", None)),
    f"{OPTIM}.zero_indexed_step": (f"{OPTIM}.lr_scheduler_type", ("constant", None)),
    "algorithm.pf_ppo.": ("algorithm.use_pf_ppo", (False, None)),
    "algorithm.filter_groups.": ("algorithm.filter_groups.enable", (False, None)),
    "algorithm.rollout_correction.": ("algorithm.rollout_correction.bypass_mode", (False, None)),
    "reward_model.sandbox_fusion.": ("reward_model.sandbox_fusion.url", (None,)),
    "reward.sandbox_fusion.": ("reward.sandbox_fusion.url", (None,)),
    "reward_model.": ("reward_model.enable", (False, None)),
    "reward.reward_manager.module.": ("reward.reward_manager.source", ("register", None)),
    "trainer.v1.": ("trainer.v1.trainer_mode", SYNC),
}
"""Sections by their start, the longer first: the key that switches one on, and its values that do not."""


def switched_off(key: str, settings: Mapping[str, Any]) -> str | None:
    """Why a key does nothing; None where it does."""
    for start, (switch, off) in SWITCHES.items():
        if key.startswith(start):
            return f"{switch} is {settings.get(switch)}" if settings.get(switch) in off else None
    return None


def fixed(values: tuple[Any, ...], why: str, instead: str) -> Rule:
    """A value that needs nothing here; any other is not supported."""

    def rule(value: Any, all_: Flat) -> dict[str, Any] | str:
        if value in values:
            return why
        raise Unsupported(f"{value} is not supported; {instead}")

    return rule


def _evaluated(value: Any, all_: Flat) -> dict[str, Any] | str:
    """The values of val_kwargs that are not the rollout's own, all in one."""
    drawn = {}
    for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", -1)):
        own = all_.get(f"{ROLLOUT}.{name}", default)
        if (validated := all_.get(f"{ROLLOUT}.val_kwargs.{name}")) not in (None, own):
            drawn[name] = max(0, validated) if name == "top_k" else validated
    return {"eval.sampling": drawn} if drawn else "evaluations draw as training does"


def _betas(value: Any, all_: Flat) -> dict[str, Any] | str:
    if not isinstance(value, list) or len(value) != 2 or value[0] != 0.9:
        raise Unsupported("the first is 0.9 here; learner.beta2 is the second")
    return {"learner.beta2": value[1]}


def _warmup_ratio(value: Any, all_: Flat) -> dict[str, Any] | str:
    if not value or (all_.get(f"{OPTIM}.lr_warmup_steps") or -1) > 0:
        return "lr_warmup_steps says it, or there is none"
    steps = all_.get("trainer.total_training_steps")
    if not isinstance(steps, int):
        raise Unsupported("a share of steps whose number is not given: set learner.warmup, in updates")
    return {"learner.warmup": int(value * steps)}


def _min_lr(value: Any, all_: Flat) -> dict[str, Any] | str:
    scheduler = all_.get(f"{OPTIM}.lr_scheduler_type") or all_.get(f"{OPTIM}.warmup_style")
    return {"learner.min_lr_ratio": value} if scheduler == "cosine" else "the learning rate does not fall"


def _dtype(value: Any, all_: Flat) -> dict[str, Any] | str:
    return {"model.precision": "float32"} if value in ("float32", "fp32") else "null takes bfloat16 on a GPU"


def _epochs(value: Any, all_: Flat) -> dict[str, Any] | str:
    """Steps, where the files are there to be counted."""
    if all_.get("trainer.total_training_steps"):
        return "trainer.total_training_steps says it"
    files, groups = all_.get("data.train_files"), all_.get("data.train_batch_size", GROUPS)
    try:
        named = [str(entry) for entry in (files if isinstance(files, list) else [files] if files else [])]
        rows = sum(1 for path in data_files(named, Split.TRAIN) for _ in read_rows(path))
    except TurnwiseError as error:
        raise Unsupported("set training.steps: rows of the files / training.groups, for each epoch") from error
    if rows < groups:
        raise Unsupported(f"{rows} rows are not one batch of {groups}: set training.groups and training.steps")
    return {"training.steps": rows // groups * int(value)}


def _manager_class(value: Any, all_: Flat) -> dict[str, Any] | str:
    path = all_.get("reward.reward_manager.module.path")
    if all_.get("reward.reward_manager.source") != "importlib" or not path:
        return "reward.reward_manager.name says it"
    name = all_.get("reward.reward_manager.module.name")
    return {"scoring.scorers": {"default": f"{path}:{name}"},
            "scoring.options": {str(name): {"tokenizer": all_.get(f"{MODEL}.path")}}}  # fmt: skip


def _device(value: Any, all_: Flat) -> dict[str, Any] | str:
    return {"learner.device": "cpu"} if value == "cpu" else "auto takes a GPU where there is one"


def _eval_samples(value: Any, all_: Flat) -> dict[str, Any] | str:
    size, batches = all_.get("sv2.batch_size"), all_.get("sv2.max_batches")
    if not isinstance(size, int) or not isinstance(batches, int):
        return "all rows are evaluated"
    return {"eval.samples": size * batches}


def _clip(value: Any, all_: Flat) -> dict[str, Any] | str:
    return {"algorithm.clip_low": value, "algorithm.clip_high": value}


def nothing(why: str) -> Rule:
    """A rule that says why a key is not needed, whatever its value."""
    return lambda value, all_: why


RULES: dict[str, Rule] = {
    f"{OPTIM}.optimizer": fixed(("AdamW",), "it is AdamW", "learner.optimizer is AdamW, with moments in 32 or 8 bits"),
    f"{OPTIM}.optimizer_impl": fixed(("torch.optim",), "it is AdamW", "learner.optimizer has one in 8 bits"),
    f"{OPTIM}.total_training_steps": nothing("training.steps says it"),
    f"{OPTIM}.betas": _betas,
    f"{OPTIM}.clip_grad": nothing(f"{ACTOR}.grad_clip says it"),
    f"{OPTIM}.lr_warmup_steps_ratio": _warmup_ratio,
    f"{OPTIM}.min_lr_ratio": _min_lr,
    f"{ACTOR}.rollout_n": nothing(f"{ROLLOUT}.n says it"),
    f"{ACTOR}.data_loader_seed": nothing("one seed for all: data.seed says it"),
    f"{ACTOR}.entropy_from_logits_chunk_size": nothing("scores are computed in chunks always"),
    f"{ROLLOUT}.seed": nothing("one seed for all: data.seed says it"),
    f"{ROLLOUT}.dtype": _dtype,
    f"{ROLLOUT}.gpu_memory_utilization": nothing(
        "the plan shares the GPU out: engine.memory_fraction, learner included"
    ),
    f"{ROLLOUT}.do_sample": fixed((True,), "tokens are drawn", "sampling.temperature=0 takes the likeliest token"),
    f"{ROLLOUT}.val_kwargs.temperature": _evaluated,
    f"{ROLLOUT}.val_kwargs.top_p": _evaluated,
    f"{ROLLOUT}.val_kwargs.top_k": _evaluated,
    f"{ROLLOUT}.val_kwargs.do_sample": nothing("val_kwargs.temperature says it"),
    f"{ROLLOUT}.expert_parallel_size": nothing("servers.options has vLLM's and SGLang's own"),
    f"{ROLLOUT}.nnodes": nothing(NODES),
    f"{ROLLOUT}.n_gpus_per_node": nothing(GPUS),
    f"{ROLLOUT}.update_weights_bucket_megabytes": nothing("weights go one at a time, or not at all"),
    f"{ROLLOUT}.moe_load_balance_metrics_interval": nothing("metrics.jsonl has all numbers of a run"),
    "data.audio_key": nothing("the engine reads text only"),
    "data.return_multi_modal_inputs": nothing("the engine reads text only"),
    "reward.num_workers": nothing("scoring.workers=0 takes what the machine has"),
    "reward.reward_manager.module.path": _manager_class,
    "reward.reward_manager.module.name": _manager_class,
    "reward_model.sandbox_fusion.memory_limit_mb": to("sandbox.memory_mb"),
    "reward.sandbox_fusion.memory_limit_mb": to("sandbox.memory_mb"),
    f"{MODEL}.lora.rank": to("learner.lora_rank"),
    f"{MODEL}.lora.alpha": to("learner.lora_alpha"),
    "trainer.total_epochs": _epochs,
    "trainer.n_gpus_per_node": nothing(GPUS),
    "trainer.device": _device,
    "trainer.esi_redundant_time": nothing("training.max_minutes ends a run in time"),
    "trainer.default_local_dir": nothing("runs lie under runs_dir, by their names"),
    "trainer.ray_wait_register_center_timeout": nothing(
        "ray.wait_seconds is how long a cluster's actors are waited for"
    ),
    "trainer.use_legacy_worker_impl": nothing("the learner is ours"),
    "trainer.v1.trainer_mode": fixed(
        ("sync",), "training.max_lag is 0", "training.max_lag=1 and more collects ahead of the weights"
    ),
    "training.total_steps": to("training.steps"),
    "training.eval_every_n_steps": to("training.eval_every"),
    "training.save_every_n_steps": to("training.save_every"),
    "training.ppo_epochs": to("training.epochs"),
    "training.learning_rate": to("learner.lr"),
    "training.clip_ratio": _clip,
    "training.gamma": to("algorithm.gamma"),
    "training.gae_lambda": to("algorithm.gae_lambda"),
    "sv2.interaction_name": to("rollout.interaction"),
    "sv2.batch_size": _eval_samples,
    "sv2.max_batches": _eval_samples,
    "sv2.dump_jsonl": nothing("`turnwise eval --out FILE` writes the episodes"),
}
"""By the key of verl's or, at the end, of sv2's; where no switch is off."""
