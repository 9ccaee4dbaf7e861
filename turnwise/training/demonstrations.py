"""Recorded trajectories to learn from: found by file, pattern or run, chosen by reward, never of the evaluation set."""

import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from turnwise.config import Config
from turnwise.errors import DataError, StorageError, TurnwiseError
from turnwise.ledger import Media
from turnwise.rollout.prepare import load_samples
from turnwise.storage.images.copies import prepare_again
from turnwise.storage.images.reader import run_of
from turnwise.storage.recorder import Recorder
from turnwise.storage.run_dir import TOKENIZER, RunDir
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.types import Sample, Trajectory

TRAINING_ROWS = (
    "use a training run's trajectories (sft.recorded=[runs/NAME]), or evaluate on training rows and use those "
    "(turnwise eval data.eval_files=[train.parquet])"
)

KEPT, ABOUT = "trajectories/step_000000.parquet", "demonstrations.json"
"""In a run of fine-tuning: what it learns from, which comes before its first step; and what became of the rest."""


class _About(BaseModel):
    """The whole of demonstrations.json."""

    model_config = ConfigDict(extra="forbid", strict=True)

    read: int
    dropped: dict[str, int]
    origin: str


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """What is learned from, and what became of the rest."""

    used: list[Trajectory]
    read: int
    dropped: dict[str, int]
    """How many were left out, by reason."""
    origin: str = "recorded"

    def __str__(self) -> str:
        left_out = "".join(f", {count} {reason}" for reason, count in self.dropped.items())
        return f"{self.read} {self.origin} trajectories{left_out}, {len(self.used)} used"


def read_demonstrations(
    config: Config,
    tokenizer: str,
    vocabulary: int,
    note: Callable[[str], None],
    prepare: Callable[[bytes], Media] | None = None,
) -> Demonstrations:
    """The trajectories of `sft.recorded`; `tokenizer` and `vocabulary` are those of the model that is to learn, as is
    what prepares images (None: it reads text only)."""
    files = find_files(config.sft.recorded)
    for file in files:
        _refuse_other_tokenizer(file, tokenizer)
    read = {file: read_trajectories(file) for file in files}
    chosen = choose([entry for several in read.values() for entry in several], config, vocabulary, note)
    used = {id(trajectory) for trajectory in chosen.used}
    for file, several in read.items():
        folder = file.parent if _run_of(file) is None else run_of(file)
        prepare_again(folder, [trajectory for trajectory in several if id(trajectory) in used], prepare)
    from_evaluations = [file for file in files if _run_of(file) is not None and file.parent.name == "eval"]
    if from_evaluations:
        note(
            f"warning: {from_evaluations[0]} was recorded by an evaluation; a model that learns from the samples it is "
            f"measured on has no held-out accuracy. If those are evaluation rows, {TRAINING_ROWS}"
        )
    return chosen


def choose(
    trajectories: Sequence[Trajectory], config: Config, vocabulary: int, note: Callable[[str], None]
) -> Demonstrations:
    """Those that can be learned from and have at least `sft.min_reward`; DataError for samples of the evaluation."""
    reasons = [_reason_against(trajectory, config.sft.min_reward) for trajectory in trajectories]
    used = [candidate for candidate, reason in zip(trajectories, reasons, strict=True) if reason is None]
    dropped = dict(Counter(reason for reason in reasons if reason is not None).most_common())
    if not used:
        why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise DataError(
            f"none of {len(trajectories)} recorded trajectories is left to learn from: {why or 'none read'}"
        )
    most = max(int(ledger.token_ids.max()) for candidate in used for ledger in candidate.segments if len(ledger))
    if most >= vocabulary:
        raise DataError(
            f"the trajectories hold token {most} and {config.model.path} knows {vocabulary}: another model's"
        )
    _refuse_evaluation_samples(used, config, note)
    rewards = [trajectory.reward for trajectory in used if trajectory.reward is not None]
    if config.sft.min_reward is None and rewards and min(rewards) < max(rewards):
        note(
            f"warning: trajectories with rewards from {min(rewards):g} to {max(rewards):g} are all imitated alike; "
            "sft.min_reward leaves out the bad ones"
        )
    return Demonstrations(used, len(trajectories), dropped)


async def keep(recorder: Recorder, demonstrations: Demonstrations) -> None:
    """Record what a run learns from in the run itself: to look at, and to resume with."""
    await recorder.record(KEPT, demonstrations.used)
    about = _About(read=demonstrations.read, dropped=demonstrations.dropped, origin=demonstrations.origin)
    recorder.run.write_json(ABOUT, about.model_dump())


def kept(run: RunDir) -> Demonstrations | None:
    """What `keep` recorded; None of a run that had not come so far."""
    if not (run.path / ABOUT).is_file():
        return None
    try:
        about = _About.model_validate_json(run.read_bytes(ABOUT))
    except ValidationError as error:
        raise StorageError(f"{run.path / ABOUT} cannot be used: {error.errors()[0]['msg']}") from error
    return Demonstrations(read_trajectories(run.path / KEPT), about.read, about.dropped, about.origin)


def find_files(places: Sequence[str]) -> list[Path]:
    """Trajectory files by name or pattern; a run's folder stands for its training trajectories."""
    files: dict[Path, None] = {}
    for pattern in places:
        path = Path(pattern).expanduser()
        if path.is_dir() or not (path.exists() or path.suffix or glob.has_magic(pattern)):
            here = sorted(RunDir.open(path).path.glob("trajectories/*.parquet"))
            if not here:
                raise DataError(f"sft.recorded: {path} has no training trajectories; {TRAINING_ROWS}")
        elif path.is_file() or not glob.has_magic(pattern):
            here = [path]
        else:
            here = [Path(name) for name in sorted(glob.glob(os.path.expanduser(pattern)))]
            if not here:
                raise DataError(f"sft.recorded: no file is called {pattern} (from {Path.cwd()})")
        files |= dict.fromkeys(file.resolve() for file in here)
    return list(files)


def _reason_against(trajectory: Trajectory, min_reward: float | None) -> str | None:
    if trajectory.failure is not None:
        return "failed"
    if not any(ledger.loss_mask.any() for ledger in trajectory.segments):
        return "without tokens (an endpoint records none)"
    if min_reward is not None and trajectory.reward is None:
        return "without a reward"
    if min_reward is not None and trajectory.reward is not None and not trajectory.reward >= min_reward:
        return f"with reward < {min_reward:g}"
    return None


def _refuse_evaluation_samples(used: Sequence[Trajectory], config: Config, note: Callable[[str], None]) -> None:
    try:
        heldout = {_key(sample) for sample in load_samples(config, "test", config.eval.samples)}
    except TurnwiseError as error:
        note(f"warning: whether the trajectories are of evaluation samples is not known: {error}")
        return
    same = [trajectory for trajectory in used if _key(trajectory.sample) in heldout]
    if same:
        raise DataError(
            f"{len(same)} of {len(used)} trajectories are of samples that this config evaluates on (first: "
            f"{same[0].sample.id}), so its accuracy would say nothing; {TRAINING_ROWS}"
        )


def _key(sample: Sample) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Id and words: small tasks ask the same question in both splits, and two files may have one name."""
    return sample.id, tuple((message.role.value, message.text) for message in sample.prompt)


def _run_of(file: Path) -> Path | None:
    """The folder of the run that a trajectory file lies in."""
    run = file.parent.parent
    return run if (run / "config.yaml").is_file() else None


def _refuse_other_tokenizer(file: Path, tokenizer: str) -> None:
    """Token ids mean nothing to a model with another vocabulary; a run keeps the tokenizer it was recorded with."""
    run = _run_of(file)
    if run is not None and (run / TOKENIZER).is_file():
        recorded = RunDir(run).read_text(TOKENIZER)
        if recorded != tokenizer and _vocabulary(recorded) != _vocabulary(tokenizer):
            raise DataError(f"sft.recorded: {file} was recorded with another tokenizer than that of the model")


def _vocabulary(tokenizer: str) -> Any:
    try:
        content = json.loads(tokenizer)
        return content["model"]["vocab"], [(token["id"], token["content"]) for token in content["added_tokens"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"a recorded {TOKENIZER} cannot be read: {error}") from error
