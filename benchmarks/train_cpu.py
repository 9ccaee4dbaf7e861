"""Seconds of one GRPO step from rollout to new weights over TRL's GRPOTrainer, with a tool, on the bundled model.

Both sides train all weights of the bundled model in float32 on the CPU: 8 prompts of the arithmetic task and 8
episodes of each per step, the tool `calculate`, several turns, temperature 1, one AdamW update per step, the same
learning rate, clipping, token-mean loss, group-normalised advantages and no reference. The prompts are the same token
by token and in the same order, and the reward reads the same number in the same way. Episodes end with an answer or
after the same number of tokens. TRL generates with transformers and is told, through the tokenizer's public
`response_template`, how the model writes calls. Two differences stay: a malformed call ends TRL's episode and is
answered in ours, and the texts of tool errors differ. We also write each step's trajectories to disk; TRL logs nothing.

Each side runs in processes of its own, in turn with the others, with each thread count; start-up and the first step do
not count. The fastest setting of each side makes the ratio; TRL's are gradient checkpointing on (its default) and off.
TRL is needed for this benchmark only: pip install trl datasets

    python benchmarks/train_cpu.py [--steps 5] [--rounds 1] [--threads 1 2] [--prompts 8] [--siblings 8]
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_TOKENS = 192
"""Of an episode after its prompt, the tool's replies included."""
MAX_TURNS = 16
LR = 1e-5
"""Small, so that both policies stay what they were and write equally much."""
SIDES = {"ours": "Turnwise", "trl": "TRL", "trl_recompute": "TRL, gradient checkpointing (its default)"}


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: wall seconds, tokens the policy wrote, mean reward."""

    seconds: float
    tokens: int
    reward: float


def our_config(steps: int, prompts: int, siblings: int, threads: int, runs: Path) -> Any:
    """The run as our config; the other side reads its samples and sizes from here too."""
    from turnwise.data.task_config import configure

    return configure(
        "task=arithmetic", "rollout.tools=[calculate]", "rollout.interaction=null", "rollout.agent=tool_calling",
        f"rollout.max_tokens={MAX_TOKENS}", f"sampling.max_tokens={MAX_TOKENS}", "sampling.temperature=1",
        f"rollout.max_assistant_turns={MAX_TURNS}", f"training.steps={steps}", f"training.groups={prompts}",
        f"training.group_size={siblings}", f"training.samples={steps * prompts}", "training.shuffle=false",
        "training.eval_every=0", "training.save_every=0", "eval.samples=1", "algorithm.advantage=grpo",
        "learner.token_budget=65536", f"learner.lr={LR}", f"engine.threads={threads}",
        f"engine.max_batch={prompts * siblings}", f"runs_dir={runs}", "run=benchmark",
    )  # fmt: skip


def run_ours(config: Any) -> list[Step]:
    """Train through the front door and read what the run recorded."""
    from rich.console import Console

    from turnwise.train import train

    return read_steps(train(config, console=Console(file=sys.stderr)).run)


def read_steps(run: Path) -> list[Step]:
    """The steps that one of our runs recorded."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line]
    before = [0, *(line["tokens"] for line in steps)]
    return [
        Step(line["timing_s/step"], line["tokens"] - seen, line["critic/score/mean"])
        for line, seen in zip(steps, before, strict=False)
    ]


def run_trl(config: Any, recompute: bool) -> list[Step]:
    """The same with GRPOTrainer on the CPU."""
    import torch

    torch.set_num_threads(config.engine.threads)
    return train_with_trl(config, dtype="float32", recompute=recompute, changes={})


def train_with_trl(
    config: Any, *, dtype: str, recompute: bool, changes: dict[str, Any], reward: "Reward | None" = None
) -> list[Step]:
    """A run of GRPOTrainer by our config, with `changes` to its settings; a step lasts from the end of the one before
    to its own end."""
    import datasets
    import transformers
    import trl

    from turnwise.engines.opener import model_source
    from turnwise.rollout.prepare import prepare

    prepared = prepare(config, "train", limit=config.training.samples)
    folder = model_source(config).folder
    used = config.rollout.tools == ["calculate"]
    schemas = prepared.toolbox.schemas(config.rollout.tools)
    tokenizer = trl_tokenizer(folder, schemas) if used else transformers.AutoTokenizer.from_pretrained(folder)
    rows = [
        {
            "prompt": [{"role": message.role.value, "content": message.content} for message in sample.prompt],
            "truth": sample.ground_truth,
        }
        for sample in prepared.samples
    ]
    lengths = prompt_lengths(prepared, tokenizer, rows, schemas)
    reward = reward or Reward(config.training.group_size)
    ends: list[tuple[float, int]] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        """When each step ended, and how many tokens had been read and written by then."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append((time.perf_counter(), 0))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append((time.perf_counter(), int(state.num_input_tokens_seen)))

    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        reward_funcs=reward.correct,
        args=trl_settings(trl, config, recompute, changes),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[calculate] if used else None,
        callbacks=[Clock()],
    )
    trainer.train()
    if reward.prompts != [row["prompt"][-1]["content"] for row in rows]:
        raise SystemExit("TRL took other prompts, or in another order")
    return steps_of(ends, reward.means, lengths, config.training.groups, config.training.group_size)


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: The expression.
    """
    from turnwise.rollout.tools.calculate import evaluate

    return evaluate(expression)


class Reward:
    """The task's reward as TRL calls it; remembers the prompts it saw and each step's mean."""

    def __init__(self, siblings: int) -> None:
        self.siblings = siblings
        self.prompts: list[str] = []
        self.means: list[float] = []

    def correct(self, prompts: list[Any], completions: list[Any], truth: list[str], **_: Any) -> list[float]:
        """1 when the number after the last #### of the last answer is the right one."""
        from turnwise.data.number_answers import extract_answer, read_number

        said = [[m["content"] or "" for m in messages if m["role"] == "assistant"][-1] for messages in completions]
        found = [float(extract_answer(text) == read_number(right)) for text, right in zip(said, truth, strict=True)]
        self.prompts += [prompt[-1]["content"] for prompt in prompts[:: self.siblings]]
        self.means.append(statistics.fmean(found))
        return found


def trl_tokenizer(folder: Path, schemas: list[Any]) -> Any:
    """The model's tokenizer, told how calls are written and which schema the prompt shows."""
    import transformers
    from trl.chat_template_utils import qwen3_template

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = qwen3_template  # hermes calls, as the bundled model writes them
    # TRL makes a schema of its own from a function; this puts ours in its place, so that the prompts are the same.
    tokenizer.chat_template = f"{{%- set tools = tools and {json.dumps(schemas)} -%}}{tokenizer.chat_template}"
    return tokenizer


def prompt_lengths(prepared: Any, tokenizer: Any, rows: list[dict[str, Any]], schemas: list[Any]) -> list[int]:
    """Tokens of each prompt; stops when the two sides would not read the same ones."""
    lengths = []
    tools = [calculate] if schemas else None
    for sample, row in zip(prepared.samples, rows, strict=True):
        theirs = tokenizer.apply_chat_template(row["prompt"], tools=tools, add_generation_prompt=True)["input_ids"]
        if prepared.renderer.open(sample.prompt, schemas) != theirs:
            raise SystemExit(f"the prompts of {sample.id} differ:\n{tokenizer.decode(theirs)}")
        lengths.append(len(theirs))
    return lengths


def trl_settings(trl: Any, config: Any, recompute: bool, changes: dict[str, Any]) -> Any:
    """GRPOConfig with the values of ours; everything that does not train is off."""
    settings = {
        "output_dir": config.runs_dir,
        "per_device_train_batch_size": config.training.groups * config.training.group_size,
        "gradient_accumulation_steps": 1,
        "num_generations": config.training.group_size,
        "max_steps": config.training.steps,
        "max_completion_length": MAX_TOKENS,
        "max_tool_calling_iterations": MAX_TURNS - 1,
        "temperature": 1.0,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": config.learner.weight_decay,
        "max_grad_norm": config.learner.grad_clip,
        "loss_type": "bnpo",  # the mean over all tokens of the batch
        "scale_rewards": "group",
        "beta": 0.0,
        "shuffle_dataset": False,
        "gradient_checkpointing": recompute,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": config.seed,
    }
    return trl.GRPOConfig(**(settings | changes))


def steps_of(
    ends: Sequence[tuple[float, int]], rewards: Sequence[float], lengths: Sequence[int], prompts: int, siblings: int
) -> list[Step]:
    """TRL counts the tokens of prompts and policy together; the prompts are known and taken off."""
    found = []
    for number, reward in enumerate(rewards):
        (start, before), (end, after) = ends[number], ends[number + 1]
        read = siblings * sum(lengths[number * prompts : (number + 1) * prompts])
        found.append(Step(end - start, after - before - read, reward))
    return found


def child(side: str, threads: int, arguments: argparse.Namespace) -> None:
    """Run one side and print its steps, the first one left out."""
    with tempfile.TemporaryDirectory() as folder:
        config = our_config(1 + arguments.steps, arguments.prompts, arguments.siblings, threads, Path(folder))
        steps = run_ours(config) if side == "ours" else run_trl(config, side == "trl_recompute")
    print(json.dumps([[step.seconds, step.tokens, step.reward] for step in steps[1:]]))


def run_child(side: str, threads: int, arguments: argparse.Namespace) -> list[Step]:
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("steps", "prompts", "siblings")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, __file__, *sizes, "--child", side, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{SIDES[side]} with {threads} thread(s) failed:\n{done.stdout}\n{done.stderr}")
    return [Step(*entry) for entry in json.loads(done.stdout.splitlines()[-1])]


def compare(arguments: argparse.Namespace) -> None:
    from importlib.metadata import version

    counts = sorted({1, len(os.sched_getaffinity(0))}) if arguments.threads is None else arguments.threads
    runs: dict[tuple[str, int], list[Step]] = {(side, count): [] for count in counts for side in SIDES}
    for _ in range(arguments.rounds):
        for (side, threads), steps in runs.items():
            found = run_child(side, threads, arguments)
            shown = " ".join(f"{step.seconds:.2f}" for step in found)
            print(f"  {SIDES[side]}, {threads} thread(s): {shown} s", file=sys.stderr, flush=True)
            steps += found
    print(f"one GRPO step, {arguments.prompts} prompts x {arguments.siblings} episodes of several turns with one tool;")
    print(f"median (and range) of {arguments.rounds} x {arguments.steps} steps; TRL {version('trl')}")
    best: dict[str, float] = {}
    for (side, threads), steps in runs.items():
        times = [step.seconds for step in steps]
        seconds, tokens = statistics.median(times), statistics.fmean(step.tokens for step in steps)
        reward = statistics.fmean(step.reward for step in steps)
        name = "ours" if side == "ours" else "trl"
        best[name] = min(seconds, best.get(name, seconds))
        print(f"  {SIDES[side]:41s} {threads} thread(s) {seconds:7.2f} s/step ({min(times):.2f} to {max(times):.2f}) "
              f"{tokens:7.0f} policy tokens/step, reward {reward:.3f}")  # fmt: skip
    print(f"  ratio of the fastest settings: {best['trl'] / best['ours']:.2f} (target: at least 3)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each process, after one that is not")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each setting, in turn")
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--siblings", type=int, default=8, help="episodes of a prompt")
    parser.add_argument("--threads", type=int, nargs="+", help="thread counts to try; 1 and all cores unless told")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: {' and '.join(missing)} not installed; to compare with TRL: pip install trl datasets")
        return
    if arguments.child:
        child(arguments.child[0], int(arguments.child[1]), arguments)
        return
    compare(arguments)


if __name__ == "__main__":
    main()
