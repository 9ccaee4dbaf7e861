"""verl's configs as ours: keys of both releases, scripts, and the fate of every key."""

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from turnwise.commands.cli import main
from turnwise.config.compose import other_names
from turnwise.config.knobs import knobs_of
from turnwise.config.sections import full_config
from turnwise.config.strict_yaml import write_yaml
from turnwise.data.task_config import compose
from turnwise.errors import ConfigError
from turnwise.ext.verl.translation.translate import FateKind, translate

OLD = """\
hydra: {searchpath: [file://verl/trainer/config]}
defaults: [ppo_trainer, _self_]
data: {train_files: t.jsonl, val_files: v.jsonl, train_batch_size: 64, max_prompt_length: 256, max_response_length: 96,
  return_raw_chat: true, filter_overlong_prompts: true, truncation: error, apply_chat_template_kwargs: {thinking: false}}
actor_rollout_ref:
  model: {path: tiny, enable_gradient_checkpointing: true}
  actor: {ppo_mini_batch_size: 16, clip_ratio: 0.2, clip_ratio_high: 0.28, use_kl_loss: true, kl_loss_type: low_var_kl,
    optim: {lr: 1e-6}, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 4096, fsdp_config: {param_offload: false}}
  rollout: {name: sglang, mode: async, n: 4, top_k: -1, response_length: '${data.max_response_length}',
    multi_turn: {enable: true, max_assistant_turns: 5, max_parallel_calls: 1, max_tool_response_length: 256,
      tool_response_truncate_side: left, format: hermes, interaction_config_path: users.yaml},
    agent: {num_workers: 8, default_agent_loop: tool_agent}}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, use_kl_in_reward: false, lam: 1.0}
reward_model: {reward_manager: dapo, overlong_buffer: {enable: true, len: 32, penalty_factor: 0.5}}
custom_reward_function: {path: reward.py, name: score, reward_kwargs: {bonus: 0.5}}
trainer: {total_epochs: 15, total_training_steps: 10, logger: [console, swanlab], save_freq: -1, project_name: p,
  experiment_name: e, n_gpus_per_node: 8, test_freq: 5}
mystery: {key: 7}
"""
SCRIPT = """\
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-0.6B}
size=${SIZE:-32}   # rows
FOLDER="$HOME/gsm8k"
STAMP=$(date +%Y)
DATA=(
    data.train_files="${FOLDER}/train.parquet"   # made before
    data.train_batch_size=${size}
)
ROLLOUT=(
    actor_rollout_ref.rollout.n=4
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$(pwd)/tools.yaml"
)
# python3 -m verl.trainer.main_ppo old.key=1
python3 -m verl.trainer.main_ppo --config-path=config --config-name='multiturn' \\
    "${DATA[@]}" "${ROLLOUT[@]}" actor_rollout_ref.model.path=$MODEL_PATH \\
    trainer.experiment_name=x_$STAMP "$@"
"""
NEW = """\
#!/bin/bash
set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=gae \\
    data.train_files=$UNSET/train.parquet +data.val_files="['a.parquet', 'b.parquet']" \\
    actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side=left \\
    actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py \\
    actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml \\
    actor_rollout_ref.rollout.multi_turn.format=gpt-oss \\
    reward.custom_reward_function.path=r.py reward.reward_manager.name=prime critic.optim.lr=1e-5 \\
    trainer.v1.trainer_mode=sync  $@
"""


def test_a_config_of_061_becomes_ours(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(OLD)
    found = translate(file, other_names())
    assert {
        "training.groups": 64, "training.minibatches": 4, "training.group_size": 4, "rollout.max_tokens": 96,
        "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28, "algorithm.advantage": "dr_grpo", "sampling.top_k": 0,
        "algorithm.kl_loss": 0.001, "algorithm.kl_loss_estimator": "k3", "algorithm.overlong_tokens": 32,
        "rollout.keep": "head", "rollout.max_reply_tokens": 64, "rollout.agent": "tool_calling", "training.steps": 10,
        "scoring.scorers": {"default": "reward.py:score"}, "scoring.options": {"score": {"bonus": 0.5}},
        "data.overlong": "filter", "training.save_every": 0, "learner.token_budget": 4096, "task": None,
        "chat.template_kwargs": {"thinking": False}, "learner.weight_decay": 0.01,
    }.items() <= found.values.items()  # fmt: skip
    fates = {fate.key: fate for fate in found.fates}
    assert fates["hydra.searchpath"].kind is fates["defaults"].kind is FateKind.NOT_SUPPORTED
    assert "it is not read" in fates["defaults"].text
    assert fates["trainer.logger"].text.startswith("swanlab: metrics.jsonl has all numbers")
    assert fates["mystery.key"].kind is FateKind.NOT_SUPPORTED
    assert fates["actor_rollout_ref.rollout.mode"].kind is FateKind.NOT_NEEDED
    assert fates["actor_rollout_ref.actor.optim.weight_decay"].text.endswith("(verl's default)")
    assert len(fates) == len(found.fates)


def test_the_logger_of_codev_is_answered_with_what_writes_its_files(tmp_path: Path) -> None:
    file = tmp_path / "codev.yaml"
    file.write_text("trainer: {logger: [console, wandb, rl_logging_board]}\n")
    (fate,) = (fate for fate in translate(file, other_names()).fates if fate.key == "trainer.logger")
    assert fate.kind is FateKind.NOT_SUPPORTED and "turnwise export-jsonl" in fate.text


@pytest.mark.usefixtures("shells")
def test_a_script_of_091_becomes_ours(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(NEW)
    found = translate(file, other_names())
    assert {
        "rollout.keep": "tail", "rollout.tools": ["tools.yaml", "tools.py"], "algorithm.advantage": "gae",
        "chat.tool_format": "gpt_oss", "scoring.run": "pool", "learner.critic_lr": 1e-5,
        "scoring.scorers": {"default": "r.py:compute_score"}, "data.eval_files": ["a.parquet", "b.parquet"],
    }.items() <= found.values.items()  # fmt: skip
    (home,) = [fate for fate in found.fates if fate.key == "data.train_files"]
    assert home.kind is FateKind.NOT_SUPPORTED and "write the value itself" in home.text
    (tmp_path / "other.sh").write_text("echo hello\n")
    with pytest.raises(ConfigError, match="no program of verl's is started with keys"):
        translate(tmp_path / "other.sh", {})


@pytest.mark.usefixtures("shells")
def test_a_script_is_read_with_the_variables_and_arrays_it_sets(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    found = translate(file, other_names())
    assert {
        "data.train_files": [f"{Path.home()}/gsm8k/train.parquet"], "training.groups": 32, "training.group_size": 4,
        "rollout.tools": [f"{Path.cwd()}/tools.yaml"], "model.path": "Qwen/Qwen3-0.6B",
    }.items() <= found.values.items()  # fmt: skip
    fates = {fate.key: fate for fate in found.fates}
    assert "it is not read" in fates["defaults"].text and fates["defaults"].value == "multiturn"
    assert re.fullmatch(r"x_\d{4}", fates["trainer.experiment_name"].value) and "old.key" not in fates


@pytest.mark.usefixtures("shells")
def test_a_command_of_sv2_becomes_ours(tmp_path: Path) -> None:
    file = tmp_path / "eval.sh"
    words = "sv2.interaction_name=code_verify sv2.batch_size=4 sv2.max_batches=2 sv2.dump_jsonl=d.jsonl"
    file.write_text(f"python -m sv2.main_ppo_multiturn_toolcall --config-name sv2_multiturn {words}\n")
    found = translate(file, other_names())
    assert {
        "rollout.interaction": "code_verify", "eval.samples": 8,
    }.items() <= found.values.items()  # fmt: skip


SMALL = """\
data: {train_files: t.jsonl, train_batch_size: 4, max_prompt_length: 64}
actor_rollout_ref:
  model: {path: tiny, lora: {rank: 8, alpha: 16}}
  actor: {ppo_mini_batch_size: 2, entropy_coeff: 0.01, grad_clip: 0.5, ppo_epochs: 2, kl_loss_coef: 0.02, use_kl_loss: true,
    optim: {lr: 1e-5, betas: [0.9, 0.95], lr_warmup_steps_ratio: 0.5, optimizer: AdamW, clip_grad: 1.0},
    policy_loss: {loss_mode: gspo, ppo_kl_coef: 0.1}, fsdp_config: {optimizer_offload: true}}
  rollout: {n: 2, temperature: 0.7, dtype: float32, val_kwargs: {n: 3, temperature: 0, top_p: 1.0}}
algorithm: {adv_estimator: grpo, pf_ppo: {weight_pow: 2.0}, filter_groups: {enable: true, max_num_gen_batches: 3}}
reward: {reward_manager: {source: importlib, name: x, module: {path: m.py, name: Manager}}, sandbox_fusion: {url: null,
  memory_limit_mb: 7}}
trainer: {total_epochs: 3, device: cpu, v1: {trainer_mode: sync, sampler: {max_off_policy_threshold: 8}}, nnodes: 1}
"""


def test_smaller_keys_and_those_that_another_switches_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text("\n".join(json.dumps({"prompt": [], "n": n}) for n in range(9)))
    Path("verl.yaml").write_text(SMALL)
    found = translate(Path("verl.yaml"), other_names())
    wanted = {
        "training.steps": 6, "training.minibatches": 2, "training.epochs": 2, "eval.group_size": 3,
        "learner.beta2": 0.95, "learner.lora_rank": 8, "learner.lora_alpha": 16, "learner.grad_clip": 0.5,
        "learner.device": "cpu", "learner.offload": "optimizer", "algorithm.entropy": 0.01, "algorithm.kl_loss": 0.02,
        "algorithm.loss": "gspo", "model.precision": "float32", "sampling.temperature": 0.7, "learner.lr": 1e-5,
        "scoring.scorers": {"default": "m.py:Manager"}, "scoring.options": {"Manager": {"tokenizer": "tiny"}},
        "training.drop_constant_groups": True, "eval.sampling": {"temperature": 0},
    }  # fmt: skip
    assert {key: found.values.get(key) for key in wanted} == wanted
    refused = {fate.key.rpartition(".")[2] for fate in found.fates if fate.kind is FateKind.NOT_SUPPORTED}
    assert refused == {"lr_warmup_steps_ratio"}
    fates = {fate.key: fate for fate in found.fates}
    assert fates["trainer.v1.sampler.max_off_policy_threshold"].text == "trainer.v1.trainer_mode is sync"
    assert fates["reward.sandbox_fusion.memory_limit_mb"].text == "reward.sandbox_fusion.url is None"


def test_every_key_a_rule_or_the_table_names_is_one_of_ours() -> None:
    knobs = knobs_of(full_config())
    sections = {key.split(".")[0] for key in knobs if "." in key}
    named = {
        word
        for text in other_names().values()
        for word in re.findall(r"\b[a-z]+\.[a-z_0-9]+\b", text)
        if word.split(".")[0] in sections
    }
    assert {word for word in named if word not in knobs} == {"chat.fork"}  # a method, not a key


def test_check_prints_ours_and_then_checks_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "data_source": "x", "prompt": [{"role": "user", "content": "6*7?"}], "reward_model": {"ground_truth": "42"},
    }  # fmt: skip
    (tmp_path / "v.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "r.py").write_text("def compute_score(data_source, solution_str, ground_truth, **kwargs): return 1.0\n")
    config = {
        "data": {"val_files": str(tmp_path / "v.jsonl")}, "actor_rollout_ref": {"model": {"path": "tiny"}},
        "custom_reward_function": {"path": str(tmp_path / "r.py")}, "trainer": {"nnodes": 1},
        "algorithm": {"adv_estimator": "grpo"},
    }  # fmt: skip
    file = tmp_path / "verl.yaml"
    file.write_text(write_yaml(config))
    assert main(["check", "--from-verl", str(file), "engine=scripted", "engine.script=[hi]"]) == 0
    said = capsys.readouterr().out
    assert "#   trainer.nnodes=1: cluster=ray takes the nodes that there are" in said and "passed" in said
    ours = said[said.index("\ntask: null") : said.index("what differs")].rpartition("\n")[0]
    (tmp_path / "ours.yaml").write_text(ours)
    assert compose(["engine=scripted", "engine.script=[hi]"], tmp_path / "ours.yaml").config.training.groups == 1024
    assert main(["check", "--from-verl", str(tmp_path / "none.yaml")]) == 2


def test_no_value_breaks_out_of_the_comments_before_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is kept as a config."""
    path = tmp_path / "verl.yaml"
    path.write_text('trainer: {nnodes: "1\\nrollout: {client: evil.py:run}\\u2028b: 1\\e[31m"}\n')
    main(["check", "--from-verl", str(path), "engine=scripted", "engine.script=[hi]"])
    comments = capsys.readouterr().out.partition("\ntask: null")[0]
    assert "evil.py:run" in comments and all(line.startswith("#") for line in comments.splitlines())


@pytest.mark.skipif("TURNWISE_VERL" not in os.environ, reason="TURNWISE_VERL names no folder with verl's files")
def test_every_key_of_a_real_release_has_a_fate() -> None:
    file = Path(os.environ["TURNWISE_VERL"], "verl", "trainer", "config", "_generated_ppo_trainer.yaml")
    found = translate(file, other_names())
    kinds = Counter(fate.kind for fate in found.fates)
    assert kinds[FateKind.TRANSLATED] > 50 and kinds[FateKind.NOT_NEEDED] > 400
    refused = [fate.key for fate in found.fates if fate.kind is FateKind.NOT_SUPPORTED]
    assert refused == ["trainer.total_epochs"]
    assert {key for key in found.values if key not in knobs_of(full_config())} == set()


SV2 = """\
train: false
training: {total_steps: 100, eval_every_n_steps: 10, save_every_n_steps: 50, ppo_epochs: 2, learning_rate: 2e-6,
  clip_ratio: 0.3, gamma: 0.99, gae_lambda: 0.95}
sv2: {interaction_name: code_verify, batch_size: 4, max_batches: 2, dump_jsonl: out.jsonl}
actor_rollout_ref: {rollout: {tensor_model_parallel_size: 1, data_parallel_size: 1, free_cache_engine: false}}
"""


def test_a_config_of_sv2_becomes_ours(tmp_path: Path) -> None:
    (tmp_path / "sv2.yaml").write_text(SV2)
    found = translate(tmp_path / "sv2.yaml", other_names())
    wanted = {
        "training.steps": 100, "training.eval_every": 10, "training.save_every": 50, "training.epochs": 2,
        "learner.lr": 2e-6, "algorithm.clip_low": 0.3, "algorithm.clip_high": 0.3, "algorithm.gamma": 0.99,
        "algorithm.gae_lambda": 0.95, "rollout.interaction": "code_verify", "eval.samples": 8,
    }  # fmt: skip
    assert {key: found.values.get(key) for key in wanted} == wanted
    assert [fate.key for fate in found.fates if fate.kind is FateKind.NOT_SUPPORTED] == []


def test_the_table_of_verl_keys_points_at_keys_that_exist() -> None:
    """Every answer is `nothing; why` or starts with a key of ours, `key` or `key=value`."""
    import re

    import yaml

    import turnwise.ext.verl

    table = yaml.safe_load((Path(turnwise.ext.verl.__file__ or "").parent / "keys.yaml").read_text())
    ours = set(compose([]).values())
    for key, answer in table.items():
        assert key not in ours
        assert answer.startswith("nothing") or re.split(r"[ =;]", answer)[0] in ours, (key, answer)
