"""Seconds of one GRPO step on a GPU over TRL's GRPOTrainer, with vLLM colocated and with transformers generation.

Both sides train all weights of the same chat model on GSM8K in bfloat16: 64 prompts x 8 episodes of one turn a step,
temperature 1, one AdamW update a step, the same prompts token by token. The reward is 1 for an even number of
characters, so that every group has a gradient. Ours also renders, checks and records every episode, and once more has
two turns an episode, with a user who doubts the first answer, which TRL's one-turn step is compared with too. Each side
runs in a process of its own; start-up and the first step do not count.
TRL is needed for this benchmark only: pip install trl datasets, and vllm for the colocated way.

    python benchmarks/gpu_train.py --model FOLDER --data train.parquet [--steps 3] [--sides ours trl_vllm trl]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from train_cpu import LR, Reward, Step, read_steps, train_with_trl

SIDES = {
    "ours": "Turnwise",
    "ours_two": "Turnwise, two turns",
    "trl_vllm": "TRL, vLLM colocated",
    "trl": "TRL, transformers generation",
}
MAX_TOKENS = 256
MICRO_BATCH = 64
"""Sequences of one forward pass of TRL; ours are counted in tokens."""


def config_of(arguments: argparse.Namespace, runs: str, *, turns: int = 1) -> Any:
    """The run as our config; the other side reads its samples and sizes from here too."""
    from turnwise.data.task_config import configure

    user = ("rollout.interaction=code_verify", "rollout.max_user_turns=1") if turns > 1 else ()
    return configure(
        f"model.path={arguments.model}", f"data.train_files=[{arguments.data}]", f"data.eval_files=[{arguments.data}]",
        "task=gsm8k", "rollout.tools=[]", f"rollout.max_assistant_turns={turns}", *user,
        f"rollout.max_tokens={turns * MAX_TOKENS + 100 * (turns - 1)}",
        f"sampling.max_tokens={MAX_TOKENS}", "sampling.temperature=1",
        f"training.steps={1 + arguments.steps}", f"training.groups={arguments.prompts}",
        f"training.group_size={arguments.siblings}", f"training.samples={(1 + arguments.steps) * arguments.prompts}",
        "training.shuffle=false", "training.eval_every=0", "training.save_every=0", "eval.samples=1",
        "algorithm.advantage=grpo", f"learner.lr={LR}", f"runs_dir={runs}", "run=benchmark",
        f"rollout.concurrency={arguments.prompts * arguments.siblings}",
        f"training.max_lag={arguments.max_lag}", "algorithm.old_logprobs=sampler",  # one pass, as on the other side
    )  # fmt: skip


def even(text: str) -> float:
    """A reward that varies in every group, whatever the model knows: without it most of a step has no gradient."""
    return float(len(text.strip()) % 2 == 0)


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Our side's scorer."""
    return even(solution_str)


class Even(Reward):
    """TRL's."""

    def correct(self, prompts: list[Any], completions: list[Any], truth: list[str], **_: Any) -> list[float]:
        found = [even(messages[-1]["content"] or "") for messages in completions]
        self.prompts += [prompt[-1]["content"] for prompt in prompts[:: self.siblings]]
        self.means.append(statistics.fmean(found))
        return found


def ours(config: Any) -> list[Step]:
    """Train through the front door and read what the run recorded."""
    from rich.console import Console

    from turnwise.train import train

    return read_steps(train(config, scorer=score, console=Console(file=sys.stderr)).run)


def trl_changes(config: Any, vllm: bool) -> dict[str, Any]:
    """What differs from the settings of the CPU benchmark."""
    episodes = config.training.groups * config.training.group_size
    changes: dict[str, Any] = {
        "per_device_train_batch_size": MICRO_BATCH, "gradient_accumulation_steps": episodes // MICRO_BATCH,
        "max_completion_length": MAX_TOKENS,
        "bf16": True, "use_cpu": False,
    }  # fmt: skip
    if vllm:
        changes |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    return changes


def child(side: str, arguments: argparse.Namespace) -> None:
    """Run one side and print its steps, the first one left out."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(arguments, folder, turns=2 if side == "ours_two" else 1)
        if side.startswith("ours"):
            steps = ours(config)
        else:
            changes = trl_changes(config, vllm=side == "trl_vllm")
            reward = Even(config.training.group_size)
            steps = train_with_trl(config, dtype="bfloat16", recompute=False, changes=changes, reward=reward)
    print(json.dumps([[step.seconds, step.tokens, step.reward] for step in steps[1:]]))


def run_child(side: str, arguments: argparse.Namespace) -> list[Step]:
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("model", "data", "steps", "prompts", "siblings")]
    sizes += [f"--max-lag={arguments.max_lag}"]
    # A colocated vLLM wants the variables of a launcher, of which there is none for one process.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= alone if side == "trl_vllm" else {}
    command = [sys.executable, __file__, *sizes, "--child", side]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(f"{SIDES[side]} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}", file=sys.stderr, flush=True)
        return []
    return [Step(*entry) for entry in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder of a chat model")
    parser.add_argument("--data", help="training rows of `turnwise prepare gsm8k`")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side, after one that is not")
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--siblings", type=int, default=8, help="episodes of a prompt")
    parser.add_argument("--max-lag", type=int, default=0, help="of ours: 1 samples the next step while it learns")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available() or arguments.model is None or arguments.data is None:
        print("skipped: this benchmark needs a CUDA GPU, --model FOLDER and --data FILE")
        return
    arguments.model, arguments.data = (str(Path(name).resolve()) for name in (arguments.model, arguments.data))
    if arguments.child:
        child(arguments.child, arguments)
        return
    print(f"one GRPO step, {arguments.prompts} prompts x {arguments.siblings} episodes, medians of {arguments.steps}")
    medians: dict[str, float] = {}
    for side in arguments.sides:
        steps = run_child(side, arguments)
        if not steps:
            print(f"  {SIDES[side]:30s} failed")
            continue
        medians[side] = statistics.median(step.seconds for step in steps)
        tokens, reward = (statistics.fmean(getattr(step, name) for step in steps) for name in ("tokens", "reward"))
        ratios = [
            f", {medians[side] / medians[one]:.1f} times {SIDES[one]}" for one in medians if one.startswith("ours")
        ]
        ratio = "" if side.startswith("ours") else "".join(ratios)
        found = f"{medians[side]:8.2f} s/step, {tokens:9,.0f} policy tokens, reward {reward:.3f}{ratio}"
        print(f"  {SIDES[side]:30s} {found}", flush=True)


if __name__ == "__main__":
    main()
