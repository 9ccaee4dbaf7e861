"""What a fine-tuning learns from: recorded trajectories by file, pattern or run, and what extensions bring."""

import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from turnwise.config import Config
from turnwise.config.choices import EvalSplit
from turnwise.config.sections import value_of
from turnwise.errors import DataError, StorageError, TurnwiseError
from turnwise.extensions import named
from turnwise.ledger import NO_VERSION, Ledger, Origin
from turnwise.rollout.prepare import load_samples
from turnwise.storage.configs import read_config
from turnwise.storage.images.copies import prepare_again
from turnwise.storage.images.reader import run_of
from turnwise.storage.recorder import Recorder
from turnwise.storage.run_dir import TOKENIZER, RunDir
from turnwise.storage.status import read_status
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.system.plugins import load
from turnwise.training.endpoint_episodes import Student, with_tokens
from turnwise.types import Sample, Trajectory

TRAINING_ROWS = (
    "use a training run's trajectories (sft.recorded=[runs/NAME]), or evaluate on training rows and use those "
    "(turnwise eval eval.split=train)"
)
Note = Callable[[str], None]

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


def gather(
    config: Config, student: Student, trajectories: Sequence[Trajectory] | None, note: Note
) -> Demonstrations | None:
    """The trajectories that are handed in, or else of `sft.recorded` and of what extensions bring; None without any."""
    if trajectories is not None:
        return learned_from(choose(trajectories, config, student, note), config)
    sources = [spec for key, spec in named("demonstrations").items() if value_of(config, key)]
    parts = [read_demonstrations(config, student, note)] if config.sft.recorded else []
    parts += [load(spec, "source of demonstrations")(config, student, note) for spec in sources]
    if not parts:
        return None
    every = Demonstrations(
        [trajectory for part in parts for trajectory in part.used],
        sum(part.read for part in parts),
        dict(sum((Counter(part.dropped) for part in parts), Counter())),
        " and ".join(part.origin for part in parts),
    )
    return learned_from(every, config)


def held_out(config: Config, student: Student, note: Note) -> list[Trajectory]:
    """What extensions bring to measure the loss on, and not to learn from."""
    sources = [spec for key, spec in named("held_out").items() if value_of(config, key)]
    parts = [load(spec, "source of demonstrations")(config, student, note) for spec in sources]
    return [trajectory for part in parts for trajectory in learned_from(part, config).used]


def learned_from(demonstrations: Demonstrations, config: Config) -> Demonstrations:
    """Without the turns that an extension is asked to leave out of the loss; they stay what the others follow."""
    rules = [load(spec, "rule") for key, spec in named("unlearned").items() if value_of(config, key)]
    if not rules:
        return demonstrations
    every = [
        without_turns(entry, {turn for rule in rules for turn in rule(config, entry)}) for entry in demonstrations.used
    ]
    used = [trajectory for trajectory in every if any(ledger.loss_mask.any() for ledger in trajectory.segments)]
    if not used:
        raise DataError(f"no turn of {len(every)} trajectories is left to learn from")
    lost = {"without a turn left to learn from": len(every) - len(used)} if len(used) < len(every) else {}
    return replace(demonstrations, used=used, dropped=demonstrations.dropped | lost)


def without_turns(trajectory: Trajectory, turns: Collection[int]) -> Trajectory:
    """The trajectory with the tokens of these turns as ones that were there before: nothing is learned from them."""
    if not turns:
        return trajectory
    return replace(trajectory, segments=[_without(ledger, turns) for ledger in trajectory.segments])


def _without(ledger: Ledger, turns: Collection[int]) -> Ledger:
    out = ledger.loss_mask & np.isin(ledger.turns, list(turns))
    return Ledger.of(
        ledger.token_ids,
        np.where(out, Origin.PROMPT, ledger.origins),
        ledger.turns,
        np.where(out, 0.0, ledger.logprobs),
        np.where(out, NO_VERSION, ledger.versions),
        None if out.any() else ledger.training,
        ledger.media,
    )


def read_demonstrations(config: Config, student: Student, note: Note) -> Demonstrations:
    """The trajectories of `sft.recorded`; those of an endpoint get the tokens that the student would have written."""
    files, images = find_files(config.sft.recorded), student.renderer.images
    read = {file: read_trajectories(file) for file in files}
    for file, several in read.items():
        if any(trajectory.segments for trajectory in several):
            _refuse_other_tokenizer(file, student.renderer.tokenizer.as_json())
    chosen = choose([entry for several in read.values() for entry in several], config, student, note)
    used = {id(trajectory) for trajectory in chosen.used}
    for file, several in read.items():
        folder = file.parent if _run_of(file) is None else run_of(file)
        recorded = [trajectory for trajectory in several if id(trajectory) in used]
        prepare_again(folder, recorded, None if images is None else images.prepare)
    from_evaluations = [file for file in files if file.parent.name == "eval" and _is_of_test_rows(file)]
    if from_evaluations:
        note(
            f"warning: {from_evaluations[0]} was recorded by an evaluation; a model that learns from the samples it is "
            f"measured on has no held-out accuracy. If those are evaluation rows, {TRAINING_ROWS}"
        )
    return chosen


def choose(trajectories: Sequence[Trajectory], config: Config, student: Student, note: Note) -> Demonstrations:
    """Those that can be learned from and have at least `sft.min_reward`; DataError for samples of the evaluation."""
    reasons = Counter[str]()
    good: list[Trajectory] = []
    for trajectory in trajectories:
        reason = _reason_against(trajectory, config.sft.min_reward)
        if reason is None:
            good.append(trajectory)
        else:
            reasons[reason] += 1
    used: list[Trajectory] = []
    for outcome in with_tokens(good, config, student, note):
        if isinstance(outcome, Trajectory):
            used.append(outcome)
        else:
            reasons[outcome] += 1
    dropped = dict(reasons.most_common())
    if not used:
        why = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise DataError(
            f"none of {len(trajectories)} recorded trajectories is left to learn from: {why or 'none read'}"
        )
    most = max(int(ledger.token_ids.max()) for candidate in used for ledger in candidate.segments if len(ledger))
    if most >= student.vocabulary:
        raise DataError(
            f"the trajectories hold token {most} and {config.model.path} knows {student.vocabulary}: another model's"
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
            here = _trajectories_of(RunDir.open(path))
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


def _trajectories_of(run: RunDir) -> list[Path]:
    """Its training trajectories, or those of a run that only evaluated."""
    status = read_status(run)
    only_evaluated = status is not None and status.command == "eval"
    return sorted(run.path.glob("eval/*.parquet" if only_evaluated else "trajectories/*.parquet"))


def _reason_against(trajectory: Trajectory, min_reward: float | None) -> str | None:
    if trajectory.failure is not None:
        return "failed"
    written = [ledger.loss_mask.any() for ledger in trajectory.segments]
    if not trajectory.turns or (written and not any(written)):
        return "without a turn of the model's"
    if min_reward is not None and trajectory.reward is None:
        return "without a reward"
    if min_reward is not None and trajectory.reward is not None and not trajectory.reward >= min_reward:
        return f"with reward < {min_reward:g}"
    return None


def _refuse_evaluation_samples(used: Sequence[Trajectory], config: Config, note: Note) -> None:
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


def _is_of_test_rows(file: Path) -> bool:
    """Whether a run played it on the rows to evaluate on, as far as its config says."""
    run = _run_of(file)
    return run is not None and read_config(RunDir(run))[1].get("eval.split") != EvalSplit.train.value


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
