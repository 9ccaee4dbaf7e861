"""A tiny vision-language model learns to look before it answers: TAPO against a reward for right answers alone.

    python examples/tinylook/run.py --out OUT --seeds 0 1 --steps 80

The bundled `tiny_vision` was cold-started on scripted looks, some of them wrong on purpose. Every RL run lies under
OUT/runs (`turnwise board OUT/runs`), evaluated before, during and after on held-out images; then each policy, and the
cold start, is probed: what do its answers become when the images of its looks are spoilt? What has finished is not
repeated, so that the same command goes on where it was stopped. --smoke tries it in a minute.
"""

import argparse
import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import findings

import turnwise as tw
from turnwise.data.task import load_task
from turnwise.reports.probe import probe_model
from turnwise.rollout.image_ablations import Probe

PUZZLES = "read=2,prior=2,none=2,compare,rotate,contrast,search,count,compute"
REWARDS = {"tapo": 0.5, "accuracy": 0.0}
"""What the evidence in the looks counts, by the reward's name."""
RL = (
    "task=tinylook", "training.groups=32", "training.group_size=8", "algorithm.old_logprobs=sampler",
    "training.save_every=0", "algorithm.clip_high=0.28", "learner.lr=3e-4", "learner.beta2=0.98",
    "learner.decay=linear", "learner.min_lr_ratio=0.1",
    "rollout.max_assistant_turns=7", "sampling.temperature=1", "eval.samples=720",
)  # fmt: skip
"""GRPO as DAPO has it: loss by token, a higher upper clip, no KL."""
SMOKE = ("training.groups=2", "training.group_size=2", "eval.samples=8", "learner.warmup=0")
EVALUATIONS = 4
"""In training, for the curves."""
PROBED = 360
"""Episodes, four times each."""
ROWS = {"train": 8192, "test": 720}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the command line asks for."""

    model: str
    out: Path
    steps: int
    asked: tuple[str, ...]

    def config(self, reward: str, seed: int) -> tw.Config:
        """Of one RL run."""
        return self.configure(
            f"model.path='{self.model}'", f"run={reward}_{seed}", f"seed={seed}",
            f"scoring.options.tinylook.tool_weight={REWARDS[reward]}", f"training.steps={self.steps}",
            f"training.eval_every={max(1, self.steps // EVALUATIONS)}", f"learner.warmup={min(5, self.steps)}",
            *self.asked, "resume=auto",
        )  # fmt: skip

    def configure(self, *overrides: str) -> tw.Config:
        """Of any run here; what comes later stands."""
        files = [f"data.{kind}_files=['{self.file(name)}']" for kind, name in (("train", "train"), ("eval", "test"))]
        return tw.configure(f"runs_dir='{self.out / 'runs'}'", *RL, *files, *overrides)

    def policy(self, run: str) -> str:
        """The folder with the last weights of a run."""
        checkpoints = self.out / "runs" / run / "checkpoints"
        return str(checkpoints / (checkpoints / "latest").read_text(encoding="utf-8").strip() / "policy")

    def file(self, name: str) -> Path:
        """A prepared file."""
        return self.out / "data" / f"{name}.parquet"


def main() -> None:
    """Every run and probe that is not done yet, then the report."""
    args = _arguments()
    asked = (*(SMOKE if args.smoke else ()), *args.set)
    if args.minutes is not None:
        asked = (*asked, f"training.max_minutes={args.minutes}")
    recipe = Recipe(args.model, args.out.resolve(), 1 if args.smoke else args.steps, asked)
    for reward in args.rewards:  # a mistake is found before the first run
        for seed in args.seeds:
            recipe.config(reward, seed)
    if not recipe.file("test").exists():
        rows = dict.fromkeys(ROWS, 16) if args.smoke else ROWS
        load_task("tinylook").prepare(recipe.out / "data", puzzles=args.puzzles, **rows)
    for reward in args.rewards:
        for seed in args.seeds:
            found = tw.train(recipe.config(reward, seed))
            gc.collect()  # engines are over: the next run's find their memory free
            print(f"== {reward}, seed {seed}: {found.steps} steps in {found.seconds:.0f} s", flush=True)
    if not args.no_report:
        probe(recipe, args)
        print(findings.write(recipe.out))


def probe(recipe: Recipe, args: argparse.Namespace) -> None:
    """The cold start and every policy with the images of their looks as they are, blanked, swapped and noised."""
    models = {"cold_start": args.model} | {
        f"{reward}_{seed}": recipe.policy(f"{reward}_{seed}") for reward in args.rewards for seed in args.seeds
    }
    limit = f"eval.samples={8 if args.smoke else PROBED}"
    for name, model in models.items():
        kept = recipe.out / "probes" / f"{name}.json"
        if not kept.exists():
            found = probe_model(recipe.configure(f"model.path='{model}'", *recipe.asked, limit), list(Probe))
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(found.as_json()["results"], indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="tiny_vision", help="another that the recipe made (default: the bundled one)"
    )
    parser.add_argument("--out", type=Path, default=Path("tinylook"), help="everything is written here")
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--minutes", type=float, help="for each run at most")
    parser.add_argument("--puzzles", default=PUZZLES, help=f"kinds of question with weights (default {PUZZLES})")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="config of every run")
    parser.add_argument("--no-report", action="store_true", help="runs only; findings.py OUT writes the report later")
    parser.add_argument("--smoke", action="store_true", help="a few rows and one step, to see everything work")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except tw.TurnwiseError as error:  # a mistake that a person can mend
        print(error, file=sys.stderr)
        sys.exit(2)
