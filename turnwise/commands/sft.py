"""`turnwise sft`: fine-tune a model on conversations of files, recorded or scripted trajectories."""

import argparse
import json
import sys
from collections.abc import Mapping

from turnwise.commands import add_config, add_json, refuse_unread
from turnwise.config.check import COMMAND_LINE
from turnwise.errors import ConfigError

HELP = "fine-tune a model on conversations: of files, recorded, or scripted"
INSTEAD = {"training.steps": "sft.steps", "learner.lr": "sft.lr", "learner.warmup": "sft.warmup"}


_OF_RL = ("training.", "algorithm.", "learner.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_json(parser)
    parser.add_argument(
        "--trust-run", action="store_true", help="resume=auto: let the run's config import code and open addresses"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show which tokens of the first conversations are learned; write nothing"
    )
    parser.epilog = """\
examples:
  turnwise sft                                                      scripted episodes of the task
  turnwise sft conversations.files=[chats.jsonl]                    files of messages
  turnwise sft conversations.files=[chats.jsonl] --dry-run          which of their tokens are learned
  turnwise sft sft.recorded=[runs/first] sft.min_reward=1           the good episodes of a training run
  turnwise sft run=NAME resume=auto                                 go on with a run that was stopped
  turnwise sft model.path=FOLDER sft.recorded=[a.parquet] sft.lr=1e-4 learner.lora_rank=16
  turnwise train model.path=runs/SFT_RUN/policy                     reinforcement learning from there
"""


def _refuse_others(origins: Mapping[str, str]) -> None:
    """A key of reinforcement learning on the command line would have no effect; a file may serve both."""
    for key, origin in origins.items():
        if origin == COMMAND_LINE and key.startswith(_OF_RL) and not _is_read(key):
            hint = f"; use {INSTEAD[key]}" if key in INSTEAD else ""
            raise ConfigError(f"{key} belongs to reinforcement learning and is not read by turnwise sft{hint}")


def _is_read(key: str) -> bool:
    from turnwise.config.sections import knob_for

    return (knob := knob_for(key)) is not None and "for_sft" in knob.marks


def run(args: argparse.Namespace) -> int:
    """The trained model is the folder `policy` of the run. A run that is resumed has its own config."""
    from turnwise.training.runs.resume_config import compose_training

    composed = compose_training(args.overrides, args.config, trusted=args.trust_run)
    refuse_unread(composed)
    _refuse_others(composed.origins)
    from rich.console import Console

    from turnwise.sft import fine_tune, preview

    out = Console()
    if args.dry_run:
        learned = preview(composed.config)
        out.print(learned, soft_wrap=True, highlight=False)
        if args.json:
            sys.stdout.write(json.dumps(learned.as_json()) + "\n")
        return 0
    report = fine_tune(composed.config)
    out.print(report, soft_wrap=True, highlight=False)
    if args.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    return 0
