"""`turnwise chat`: talk to a policy with the tools of a task, as the user of its episodes."""

import argparse
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.commands import add_trust
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.config import Config
    from turnwise.rollout.prepare import Prepared
    from turnwise.rollout.terminal import Terminal
    from turnwise.types import Sample, Trajectory

COMMANDS = "/reset begins a new conversation, /exit or the end of the input leaves"
HELP = "talk to a policy, with its tools and, if wanted, its simulated user"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="RUN|MODEL key=value",
        help="a run directory or a model (default: the configured one), and config values such as task=my_task.py",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file of config values")
    parser.add_argument("--sample", type=int, metavar="K", help="begin with this evaluation sample, and score the end")
    parser.add_argument("--user", action="store_true", help="let the task's simulated user answer in your place")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the conversations to this file, one a line")
    add_trust(parser)
    parser.epilog = f"""\
{COMMANDS}. Nothing is written without --out.

examples:
  turnwise chat                                            the bundled model with its tools
  turnwise chat runs/first                                 the policy of a run, with the run's task
  turnwise chat runs/first --sample 3 --user               watch it play the fourth sample
  echo "What is 6 times 7?" | turnwise chat task=my_task.py sampling.temperature=0
"""


def run(args: argparse.Namespace) -> int:
    """Until the person leaves; what was said is written also when a signal ends it."""
    from turnwise.rollout.terminal import terminal_here
    from turnwise.storage.trajectories.files import write_jsonl
    from turnwise.system.files import check_place
    from turnwise.system.stopping import run_stoppable
    from turnwise.training.runs.policies import find_policy

    names = [word for word in args.overrides if "=" not in word]
    values = [word for word in args.overrides if "=" in word]
    if len(names) > 1:
        raise ConfigError(f"one run or model at a time, not {' and '.join(names[:3])}")
    if args.out is not None:
        check_place(args.out, "--out")
        if args.out.exists():
            raise ConfigError(f"--out {args.out}: there is such a file, and nothing is overwritten")
    named = find_policy(next(iter(names), None), values, args.config, trusted=args.trust_run)
    terminal = terminal_here()
    prepared = _prepare(named.config, args.sample, terminal, simulated=args.user)
    terminal.say(f"this is {named.name}; {COMMANDS}")
    said: list[Trajectory] = []
    try:
        run_stoppable(_talk(prepared, terminal, said, typed=args.sample is None, simulated=args.user))
    finally:
        if args.out is not None and said:
            write_jsonl(args.out, said)
    return 0


def _prepare(config: "Config", number: int | None, terminal: "Terminal", *, simulated: bool) -> "Prepared":
    """The episode's parts, with the person for its user. A person's patience has no limits that a config sets."""
    from turnwise.rollout.prepare import prepare

    sample = _sample(config, number)
    if not simulated:
        info = {key: value for key, value in sample.info.items() if key != "interaction_kwargs"}
        sample = replace(sample, interaction=None, info=info)  # what the row tells its user is nothing to a person
        free = replace(config.rollout, max_user_turns=None, max_assistant_turns=None, max_tokens=None, max_seconds=None)
        config = replace(config, rollout=free)
    user, scorer = None if simulated else terminal.user, _unscored if number is None else None
    prepared = prepare(config, "test", samples=[sample], scorer=scorer, interaction=user)
    if not prepared.samples:
        raise ConfigError(f"the prompt of {sample.id} is longer than data.max_prompt_tokens")
    if simulated and prepared.plan.route(prepared.samples[0]).interaction is None:
        raise ConfigError("--user: there is no simulated user; the task has none, and rollout.interaction is not set")
    return prepared


def _sample(config: "Config", number: int | None) -> "Sample":
    """The evaluation sample of this number; the first one where only its tools and system message matter."""
    from turnwise.rollout.prepare import load_samples
    from turnwise.types import Message, Role, Sample

    if number is None and config.task is None and not config.data.eval_files:
        return Sample("chat", (Message(Role.USER, "Hello"),), "chat")
    index = number or 0
    samples = load_samples(config, "test", index + 1) if index >= 0 else []
    if not 0 <= index < len(samples):
        raise ConfigError(f"--sample {index}: there are evaluation samples 0 to {len(samples) - 1}")
    return samples[index]


async def _talk(
    prepared: "Prepared", terminal: "Terminal", said: "list[Trajectory]", *, typed: bool, simulated: bool
) -> None:
    from turnwise.rollout.prepare import open_context
    from turnwise.rollout.terminal import conversations
    from turnwise.scoring.scorer import apply

    (sample,) = prepared.samples
    async with open_context(prepared) as context:
        talks = conversations(context, terminal, sample, typed=typed, simulated=simulated)
        async with aclosing(talks):
            async for trajectory in talks:
                said.append(trajectory)
                if not typed:
                    await apply(prepared.scoring.scorers[sample.data_source], trajectory)
                    terminal.say(f"reward: {'none' if trajectory.reward is None else f'{trajectory.reward:g}'}")


async def _unscored(trajectory: "Trajectory") -> float:
    """What a person says has no right answer."""
    return 0.0
