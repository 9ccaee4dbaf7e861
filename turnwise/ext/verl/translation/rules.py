"""How values of verl's config become values of ours: one rule for each key that has a counterpart here."""

from collections.abc import Mapping
from typing import Any

from turnwise.ext.verl.translation import minor_rules
from turnwise.ext.verl.translation.values import ACTOR, GROUPS, MODEL, ROLLOUT, TURNS, Flat, Rule, Unsupported, to

KL_COEF = 0.001
CHARS_PER_TOKEN = 4
"""verl cuts tool replies by characters, we by tokens."""
NEW_ROOTS = ("reward.", f"{TURNS}.function_tool_path", "trainer.v1.", "trainer.use_v1")
"""Keys that only 0.8 and later have."""
OLD_ROOTS = ("reward_model.", "custom_reward_function.", f"{TURNS}.interaction_config_path")


def files(key: str) -> Rule:
    """A rule that takes one file or a list of them as a list under `key`."""
    return lambda value, all_: {key: list(value) if isinstance(value, list) else [value]}


def choice(key: str, names: Mapping[str, Any], instead: str) -> Rule:
    """One of verl's names, and ours for it."""

    def rule(value: Any, all_: Flat) -> dict[str, Any] | str:
        if str(value) not in names:
            raise Unsupported(f"{value} is not supported; {instead}")
        return {key: names[str(value)]}

    return rule


def without(key: str, nothing: Any, ours: Any) -> Rule:
    """The same value, but for the one with which verl says: no such thing."""
    return lambda value, all_: {key: ours if value == nothing else value}


KL_NAMES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ADVANTAGES = {
    "gae": "gae", "grpo": "grpo", "grpo_vectorized": "grpo", "rloo": "rloo", "rloo_vectorized": "rloo",
    "remax": "remax", "reinforce_plus_plus": "reinforce_pp",
}  # fmt: skip
AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean", "seq-mean-token-sum-norm": "sequence_sum_norm",
}  # fmt: skip
FORMATS = {
    "hermes": "hermes", "gpt-oss": "gpt_oss", "qwen3_coder": "qwen3_coder", "glm": "glm", "seed": "seed",
    "minimax": "minimax", "kimi": "kimi", "deepseek_v4": "deepseek_v4", "gemma4": "gemma",
}  # fmt: skip
MANAGERS = {"naive": "inline", "dapo": "inline", "prime": "pool", "batch": "batch", "swedev": "http"}
TRACKERS = ("console", "wandb", "mlflow", "tensorboard")


def _advantage(value: Any, all_: Flat) -> dict[str, Any] | str:
    if str(value) not in ADVANTAGES:
        raise Unsupported(f"{value} is not here; yours is written as algorithm.advantage=FILE.py:function")
    ours = ADVANTAGES[str(value)]
    if ours == "grpo" and all_.get("algorithm.norm_adv_by_std_in_grpo") is False:
        ours = "dr_grpo"
    return {"algorithm.advantage": ours}


def _minibatches(value: Any, all_: Flat) -> dict[str, Any] | str:
    groups = all_.get("data.train_batch_size", GROUPS)
    if not isinstance(value, int) or not isinstance(groups, int) or value < 1 or groups % value:
        raise Unsupported(f"{groups} prompts do not divide by {value}: set training.minibatches, their number")
    return {"training.minibatches": groups // value}


def _kl_loss(value: Any, all_: Flat) -> dict[str, Any] | str:
    if not value:
        return "it is off, as here"
    return {"algorithm.kl_loss": all_.get(f"{ACTOR}.kl_loss_coef", KL_COEF)}


def _kl_reward(value: Any, all_: Flat) -> dict[str, Any] | str:
    if not value:
        return "it is off, as here"
    ours: dict[str, Any] = {"algorithm.kl_reward": all_.get("algorithm.kl_ctrl.kl_coef", KL_COEF)}
    if all_.get("algorithm.kl_ctrl.type") == "adaptive":
        ours["algorithm.kl_target"] = all_.get("algorithm.kl_ctrl.target_kl", 0.1)
    return ours


def _when(switch: str, rule: Rule) -> Rule:
    """Only where another key of verl's switches it on."""
    return lambda value, all_: rule(value, all_) if all_.get(switch) else f"{switch} is off"


def _part_of(key: str) -> Rule:
    """Read together with another key."""
    return lambda value, all_: f"{key} carries it"


def _of_critic(rule: Rule) -> Rule:
    """Only where there is a critic."""
    return lambda value, all_: (
        rule(value, all_) if all_.get("algorithm.adv_estimator") == "gae" else "only gae reads it"
    )


def _kl_name(key: str) -> Rule:
    return choice(key, KL_NAMES, "one of k1, abs, k2, k3")


def _clip(value: Any, all_: Flat) -> dict[str, Any] | str:
    low, high = f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"
    return {"algorithm.clip_low": all_.get(low, value), "algorithm.clip_high": all_.get(high, value)}


def _keep(value: Any, all_: Flat) -> dict[str, Any] | str:
    if value == "middle":
        return {"rollout.keep": "both"}
    new = any(key.startswith(NEW_ROOTS) for key in all_)
    old = any(key.startswith(OLD_ROOTS) for key in all_)
    if new == old:
        raise Unsupported(f"{value} changed its meaning in verl: until 0.7 left keeps the head, later the tail; set "
                          "rollout.keep to head or tail")  # fmt: skip
    return {"rollout.keep": "head" if (value == "left") is old else "tail"}


def _reply_length(value: Any, all_: Flat) -> dict[str, Any] | str:
    return {"rollout.max_reply_tokens": max(1, -(-int(value) // CHARS_PER_TOKEN))}


def _user_turns(value: Any, all_: Flat) -> dict[str, Any] | str:
    return {"rollout.max_user_turns": value}


def _length(value: Any, all_: Flat) -> dict[str, Any] | str:
    return {"rollout.max_tokens": value, "sampling.max_tokens": value}


def _overlong(value: Any, all_: Flat) -> dict[str, Any] | str:
    return {"data.overlong": "filter"} if value else "data.truncation decides"


def _truncation(value: Any, all_: Flat) -> dict[str, Any] | str:
    if all_.get("data.filter_overlong_prompts"):
        return "overlong prompts are filtered before"
    if value != "error":
        raise Unsupported("prompts are never cut: data.overlong=filter leaves long ones out, =error refuses them")
    return {"data.overlong": "error"}


def _agent(value: Any, all_: Flat) -> dict[str, Any] | str:
    if value == "single_turn_agent":
        return "rows without a loop get theirs from tools and interaction"
    return {"rollout.agent": "tool_calling" if value == "tool_agent" else value}


def _tools(value: Any, all_: Flat) -> dict[str, Any] | str:
    paths = [all_.get(f"{TURNS}.tool_config_path") or all_.get("data.tool_config_path")]
    paths.append(all_.get(f"{TURNS}.function_tool_path"))
    return {"rollout.tools": list(dict.fromkeys(str(path) for path in paths if path))}


def _scorer(root: str) -> Rule:
    def rule(value: Any, all_: Flat) -> dict[str, Any] | str:
        if not all_.get(f"{root}.path"):
            return "no file is named"
        name = all_.get(f"{root}.name") or "compute_score"
        ours: dict[str, Any] = {"scoring.scorers": {"default": f"{all_.get(f'{root}.path')}:{name}"}}
        prefix = f"{root}.reward_kwargs."
        options = {key.removeprefix(prefix): option for key, option in all_.items() if key.startswith(prefix)}
        return ours | ({"scoring.options": {name: options}} if options else {})

    return rule


def _manager(value: Any, all_: Flat) -> dict[str, Any] | str:
    if all_.get("reward.reward_manager.source") == "importlib":
        return "reward.reward_manager.module names a class"
    if str(value) not in MANAGERS:
        raise Unsupported(f"a manager class is a scorer here: scoring.scorers={{default: 'FILE.py:{value}'}}")
    ours: dict[str, Any] = {} if str(value) in ("naive", "dapo") else {"scoring.run": MANAGERS[str(value)]}
    for root in ("reward_model.", "reward_model.reward_kwargs.", "reward.reward_kwargs.", "reward.reward_manager."):
        buffer = f"{root}overlong_buffer{'' if root == 'reward_model.' else '_cfg'}"
        if value == "dapo" and all_.get(f"{buffer}.enable"):
            ours["algorithm.overlong_tokens"] = all_.get(f"{buffer}.len", 0)
            ours["algorithm.overlong_penalty"] = all_.get(f"{buffer}.penalty_factor", 1.0)
    return ours or "scorers run in this process"


def _trackers(value: Any, all_: Flat) -> dict[str, Any] | str:
    named = [str(entry) for entry in (value if isinstance(value, list) else [value])]
    if unknown := [name for name in named if name not in TRACKERS]:
        if "rl_logging_board" in unknown:  # of CodeV's fork
            raise Unsupported("rl_logging_board: leave it out; `turnwise export-jsonl RUN` writes its files")
        raise Unsupported(f"{', '.join(unknown)}: metrics.jsonl has all numbers; tracking.to takes "
                          f"{', '.join(TRACKERS)}")  # fmt: skip
    return {"tracking.to": named}


def _off(key: str) -> Rule:
    """A frequency, where verl's -1 or 0 means never."""
    return lambda value, all_: {key: max(0, int(value or 0))}


def _correction(value: Any, all_: Flat) -> dict[str, Any] | str:
    if not value:
        return "it is off, as here"
    if value not in ("token", "sequence"):
        raise Unsupported(f"{value}: algorithm.correction is token, sequence or geometric")
    threshold = all_.get("algorithm.rollout_correction.rollout_is_threshold", 2.0)
    return {"algorithm.old_logprobs": "learner", "algorithm.correction": value,
            "algorithm.correction_threshold": threshold}  # fmt: skip


def _warmup(value: Any, all_: Flat) -> dict[str, Any] | str:
    return {"learner.warmup": value} if isinstance(value, int) and value > 0 else "there is none"


def _offload(value: Any, all_: Flat) -> dict[str, Any] | str:
    return {"learner.offload": "optimizer"} if value else "it is off, as here"


def _resume(value: Any, all_: Flat) -> dict[str, Any] | str:
    if value == "resume_path":
        raise Unsupported("a run is resumed by its name: turnwise train run=NAME resume=auto")
    return {"resume": "auto"} if value == "auto" and all_.get("trainer.experiment_name") else "a new run begins"


def _loss(value: Any, all_: Flat) -> dict[str, Any] | str:
    names = {"vanilla": "ppo_clip", "gspo": "gspo", "cispo": "cispo"}
    return choice("algorithm.loss", names, "yours is written as algorithm.loss=FILE.py:function")(value, all_)


def _dataset(value: Any, all_: Flat) -> dict[str, Any] | str:
    path, name = all_.get("data.custom_cls.path"), all_.get("data.custom_cls.name")
    return {"data.dataset": f"{path}:{name}"} if path and name else "no class is named"


def _batches(value: Any, all_: Flat) -> dict[str, Any] | str:
    """sv2 evaluates max_batches times batch_size samples; by itself the size of a batch changes nothing."""
    size, batches = all_.get("sv2.batch_size"), all_.get("sv2.max_batches")
    return {"eval.samples": int(size) * int(batches)} if size and batches else "all samples are evaluated"


def _budget(value: Any, all_: Flat) -> dict[str, Any] | str:
    return {"learner.token_budget": value} if all_.get(f"{ACTOR}.use_dynamic_bsz") else "use_dynamic_bsz is off"


RULES: dict[str, Rule] = {
    **minor_rules.RULES,
    f"{MODEL}.path": to("model.path"),
    f"{MODEL}.trust_remote_code": to("model.trust_remote_code"),
    f"{MODEL}.lora_rank": to("learner.lora_rank"),
    f"{MODEL}.lora_alpha": _when(f"{MODEL}.lora_rank", to("learner.lora_alpha")),
    f"{MODEL}.enable_gradient_checkpointing": to("learner.gradient_checkpointing"),
    "data.train_files": files("data.train_files"),
    "data.val_files": files("data.eval_files"),
    "data.prompt_key": to("data.prompt_key"),
    "data.max_prompt_length": to("data.max_prompt_tokens"),
    "data.max_response_length": _length,
    "data.train_batch_size": to("training.groups"),
    "data.shuffle": to("training.shuffle"),
    "data.seed": to("seed"),
    "data.apply_chat_template_kwargs": to("chat.template_kwargs"),
    "data.filter_overlong_prompts": _overlong,
    "data.truncation": _truncation,
    "data.train_max_samples": without("training.samples", -1, None),
    "data.val_max_samples": without("eval.samples", -1, None),
    "data.tool_config_path": _tools,
    "data.custom_cls.path": _dataset,
    "data.custom_cls.name": _dataset,
    f"{ROLLOUT}.n": to("training.group_size"),
    f"{ROLLOUT}.temperature": to("sampling.temperature"),
    f"{ROLLOUT}.top_p": to("sampling.top_p"),
    f"{ROLLOUT}.top_k": without("sampling.top_k", -1, 0),
    f"{ROLLOUT}.response_length": _length,
    f"{ROLLOUT}.max_num_seqs": to("engine.max_batch"),
    f"{ROLLOUT}.val_kwargs.n": to("eval.group_size"),
    f"{ROLLOUT}.agent.default_agent_loop": _agent,
    f"{ROLLOUT}.agent.agent_loop_config_path": to("verl.agents_file"),
    f"{TURNS}.max_assistant_turns": to("rollout.max_assistant_turns"),
    f"{TURNS}.max_user_turns": _user_turns,
    f"{TURNS}.max_parallel_calls": to("rollout.max_parallel_calls"),
    f"{TURNS}.max_tool_response_length": _reply_length,
    f"{TURNS}.tool_response_truncate_side": _keep,
    f"{TURNS}.format": choice("chat.tool_format", FORMATS, "null infers it from the model's template"),
    f"{TURNS}.tool_config_path": _tools,
    f"{TURNS}.function_tool_path": _tools,
    f"{TURNS}.interaction_config_path": to("verl.interactions_file"),
    f"{ACTOR}.ppo_mini_batch_size": _minibatches,
    f"{ACTOR}.ppo_epochs": to("training.epochs"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": _budget,
    f"{ACTOR}.clip_ratio": _clip,
    f"{ACTOR}.clip_ratio_low": to("algorithm.clip_low"),
    f"{ACTOR}.clip_ratio_high": to("algorithm.clip_high"),
    f"{ACTOR}.clip_ratio_c": to("algorithm.clip_dual"),
    f"{ACTOR}.entropy_coeff": to("algorithm.entropy"),
    f"{ACTOR}.grad_clip": to("learner.grad_clip"),
    f"{ACTOR}.use_kl_loss": _kl_loss,
    f"{ACTOR}.kl_loss_coef": _when(f"{ACTOR}.use_kl_loss", to("algorithm.kl_loss")),
    f"{ACTOR}.kl_loss_type": _when(f"{ACTOR}.use_kl_loss", _kl_name("algorithm.kl_loss_estimator")),
    f"{ACTOR}.loss_agg_mode": choice("algorithm.aggregation", AGGREGATIONS, f"one of {', '.join(AGGREGATIONS)}"),
    f"{ACTOR}.policy_loss.loss_mode": _loss,
    f"{ACTOR}.optim.lr": to("learner.lr"),
    f"{ACTOR}.optim.weight_decay": to("learner.weight_decay"),
    f"{ACTOR}.optim.lr_warmup_steps": _warmup,
    f"{ACTOR}.optim.warmup_style": choice("learner.decay", {n: n for n in ("constant", "cosine")}, "see learner.decay"),
    f"{ACTOR}.optim.lr_scheduler_type": choice(
        "learner.decay", {"constant": "constant", "cosine": "cosine"}, "learner.decay is constant, linear or cosine"
    ),
    f"{ACTOR}.fsdp_config.optimizer_offload": _offload,
    "critic.optim.lr": _of_critic(to("learner.critic_lr")),
    "critic.cliprange_value": _of_critic(to("algorithm.value_clip")),
    "algorithm.adv_estimator": _advantage,
    "algorithm.gamma": _of_critic(to("algorithm.gamma")),
    "algorithm.lam": _of_critic(to("algorithm.gae_lambda")),
    "algorithm.use_kl_in_reward": _kl_reward,
    "algorithm.kl_penalty": _when("algorithm.use_kl_in_reward", _kl_name("algorithm.kl_reward_estimator")),
    "algorithm.filter_groups.enable": to("training.drop_constant_groups"),
    "algorithm.rollout_correction.rollout_is": _correction,
    "algorithm.rollout_is": _correction,
    "custom_reward_function.path": _scorer("custom_reward_function"),
    "custom_reward_function.name": _scorer("custom_reward_function"),
    "reward.custom_reward_function.path": _scorer("reward.custom_reward_function"),
    "reward.custom_reward_function.name": _scorer("reward.custom_reward_function"),
    "reward_model.reward_manager": _manager,
    "reward.reward_manager.name": _manager,
    "reward_model.sandbox_fusion.url": to("sandbox.url"),
    "reward.sandbox_fusion.url": to("sandbox.url"),
    "algorithm.norm_adv_by_std_in_grpo": _part_of("algorithm.adv_estimator"),
    "algorithm.kl_ctrl.type": _part_of("algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.kl_coef": _part_of("algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.target_kl": _part_of("algorithm.use_kl_in_reward"),
    "algorithm.rollout_correction.rollout_is_threshold": _part_of("algorithm.rollout_correction.rollout_is"),
    f"{ROLLOUT}.name": lambda value, all_: (
        "the default engine is Turnwise's own; engine=vllm_server or sglang_server takes theirs"
    ),
    f"{ROLLOUT}.prompt_length": to("data.max_prompt_tokens"),
    f"{ROLLOUT}.agent.num_workers": lambda value, all_: "any number of episodes run at once: rollout.concurrency",
    "trainer.total_training_steps": to("training.steps"),
    "trainer.save_freq": _off("training.save_every"),
    "trainer.test_freq": _off("training.eval_every"),
    "trainer.max_actor_ckpt_to_keep": to("training.keep"),
    "trainer.experiment_name": to("run"),
    "trainer.project_name": to("trackers.project"),
    "trainer.logger": _trackers,
    "trainer.resume_mode": _resume,
    "sv2.interaction_name": to("rollout.interaction"),
    "sv2.dump_jsonl": lambda value, all_: "`turnwise eval --out FILE` writes the episodes",
    "sv2.batch_size": _batches,
    "sv2.max_batches": _batches,
}
"""By verl's key, of 0.6.1 and of 0.9.1, and sv2's."""
