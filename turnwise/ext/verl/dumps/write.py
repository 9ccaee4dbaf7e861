"""A run's episodes as RL Logging Board reads them: one object a line, the numbers of every token of the response."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import ConfigError, DataError
from turnwise.ledger import Ledger, TokenTrainingData
from turnwise.storage.run_dir import TRAINED, RunDir
from turnwise.storage.token_texts import Pieces, decoder_of
from turnwise.storage.trajectories.files import read_trajectories
from turnwise.system.files import replacing
from turnwise.types import Trajectory

FILES = {False: (TRAINED, "rollout_data_rank0.jsonl"), True: ("eval", "rollout_data_rank_val0.jsonl")}
"""Whether evaluations are meant -> the folder of the run, and the file that is written."""
_STEP = re.compile(r"step_(\d+)\.parquet")
_PART = "part_"

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, in numbers."""

    file: Path
    steps: int
    lines: int
    notes: dict[str, int]
    """What lines lack, or which were left out, and how many."""


def export_dumps(run: RunDir, out: Path, *, evaluations: bool = False) -> Exported:
    """Write the run's training steps, or its evaluations, into the new folder `out`, one step after the other."""
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out {out} exists; nothing is overwritten")
    folder, name = FILES[evaluations]
    named = [(_STEP.fullmatch(path.name), path) for path in sorted((run.path / folder).glob("step_*.parquet"))]
    files = [(int(match[1]), path) for match, path in named if match]
    if not files:
        raise DataError(f"{run.path}: has no episodes in {folder}/")
    decoder = decoder_of(run)
    if decoder.problem is not None:
        raise DataError(f"{run.path}: {decoder.problem}")
    notes, lines = Counter[str](), 0
    out.mkdir(parents=True)
    with replacing(out / name) as file:
        for step, path in files:
            for line in _lines(read_trajectories(path, unread=True), step, decoder.pieces, notes):
                file.write(json.dumps(line, default=str).encode() + b"\n")
                lines += 1
    return Exported(out / name, len(files), lines, dict(notes))


def _lines(trajectories: Sequence[Trajectory], step: int, pieces: Pieces, notes: Counter[str]) -> Iterator[Line]:
    """The lines of a step. They all have the same columns: the board counts on it."""
    kept = [one for one in trajectories if _is_shown(one, notes)]
    chosen = [one.segments[one.turns[-1].segment] for one in kept]
    known = [ledger.training or TokenTrainingData() for ledger in chosen]
    has_reference = any(training.ref_logprobs is not None for training in known)
    has_values = any(training.values is not None for training in known)
    for trajectory, ledger, training in zip(kept, chosen, known, strict=True):
        start, texts = int(np.argmax(ledger.loss_mask)), _texts(ledger, pieces)
        columns = {
            "logprobs": ledger.logprobs,
            "token_rewards": _rewards(trajectory, ledger, training),
            **({"ref_logprobs": training.ref_logprobs} if has_reference else {}),
            **({"values": training.values} if has_values else {}),
        }
        sample = trajectory.sample
        line: Line = {
            "step": step,
            "prompt": "".join(texts[:start]),
            "response": "".join(texts[start:]),
            "response_tokens": texts[start:],
            **{name: _policy_only(column, ledger)[start:].tolist() for name, column in columns.items()},
            "reward": trajectory.reward,
            "ground_truth": sample.ground_truth,
            "data_source": sample.data_source,
            "uid": sample.id,
        }
        parts = {"acc": float(bool(trajectory.right))} | trajectory.parts
        yield line | {f"{_PART}{name}" if name in line else name: value for name, value in parts.items()}


def _is_shown(trajectory: Trajectory, notes: Counter[str]) -> bool:
    """Whether there is something to show of it; the board knows no episode without a reward."""
    if trajectory.reward is None:
        notes["episodes left out, which have no reward"] += 1
        return False
    if not trajectory.turns or not any(ledger.loss_mask.any() for ledger in trajectory.segments[:1]):
        notes["episodes left out, whose tokens were not recorded"] += 1
        return False
    if len(trajectory.segments) > 1:
        notes["episodes of several sequences, of which the last of the main conversation was written"] += 1
    return True


def _texts(ledger: Ledger, pieces: Pieces) -> list[str]:
    """Each token's text; an image's first token says what it is, and its others nothing."""
    texts = pieces(ledger.token_ids.tolist())
    for span in ledger.media:
        length = span.end - span.start
        texts[span.start : span.end] = [f"[image, {length} tokens]", *[""] * (length - 1)]
    return texts


def _rewards(trajectory: Trajectory, ledger: Ledger, training: TokenTrainingData) -> NDArray[np.float64]:
    """What training rewards: the penalty of every token, and the episode's reward at the policy's last."""
    rewards = np.zeros(len(ledger)) if training.rewards is None else training.rewards.astype(np.float64)
    rewards[np.flatnonzero(ledger.loss_mask)[-1]] += trajectory.reward or 0.0
    return rewards


def _policy_only(column: NDArray[Any] | None, ledger: Ledger) -> NDArray[np.float64]:
    """nan, which the board leaves out of its means, where the policy wrote nothing or nothing was computed."""
    if column is None:
        return np.full(len(ledger), np.nan)
    return np.where(ledger.loss_mask & np.isfinite(column), column.astype(np.float64), np.nan)
