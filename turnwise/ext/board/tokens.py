"""Every token of a trajectory with its text and what was computed for it: nothing here is tokenised again."""

from typing import Any

import numpy as np

from turnwise.ext.board.columns import Array
from turnwise.ext.board.conversation import read_trajectory
from turnwise.ext.board.images import Pictures
from turnwise.ext.board.json_values import clean_text
from turnwise.ext.board.table import Table
from turnwise.ledger import TokenTrainingData
from turnwise.storage.run_dir import RunDir
from turnwise.storage.token_texts import Pieces, decoder_of
from turnwise.types import Ledger, Origin, Trajectory

_DIGITS = 6


def tokens(run: RunDir, table: Table, shard: str, row: int, *, name: str | None = None) -> dict[str, Any]:
    """The JSON of a trajectory's token view; NotThere for a shard or row that is not there."""
    trajectory = read_trajectory(table, shard, row)
    decoder, pictures = decoder_of(run), Pictures(run, name)
    written = [ledger.versions[ledger.loss_mask] for ledger in trajectory.segments]
    several = len(np.unique(np.concatenate(written))) > 1 if written else False
    return {
        "segments": [_segment(ledger, decoder.pieces, several, pictures) for ledger in trajectory.segments],
        "branches": _branch_names(trajectory),
        "origin_names": [origin.name.lower() for origin in Origin],
        "ids_are_real": decoder.ids_are_real,
        "problem": decoder.problem,
    }


def _branch_names(trajectory: Trajectory) -> list[str | None]:
    """Whose each segment is; None for the main conversation's."""
    names: list[str | None] = [None] * len(trajectory.segments)
    for branch in trajectory.branches:
        for turn in branch.turns:
            names[turn.segment] = clean_text(branch.name) + ("" if branch.trained else " (not trained)")
    return names


def _segment(ledger: Ledger, pieces: Pieces, several_versions: bool, pictures: Pictures) -> dict[str, Any]:
    policy, ids = ledger.loss_mask, ledger.token_ids.tolist()
    training = ledger.training or TokenTrainingData()
    ours, new = training.logprobs, training.new_logprobs
    ratios = gaps = None
    with np.errstate(over="ignore", invalid="ignore"):
        if new is not None:  # a sequence of a later minibatch was computed only after the first update
            old = ledger.logprobs if ours is None else ours
            ratios = np.exp(new.astype(np.float64) - old)
        if ours is not None:
            gaps = ours.astype(np.float64) - ledger.logprobs
    return {
        "pieces": _with_images([clean_text(piece) for piece in pieces(ids)], ledger),
        "ids": ids,
        "images": [
            {"start": span.start, "end": span.end, "url": pictures.shown_url(span.media.digest)}
            for span in ledger.media
        ],
        "origins": ledger.origins.tolist(),
        "turns": ledger.turns.tolist(),
        "logprobs": _numbers(ledger.logprobs, policy),
        "entropies": _numbers(training.entropies, policy),
        "advantages": _numbers(training.advantages, policy),
        "ratios": _numbers(ratios, policy),
        "gaps": _numbers(gaps, policy),
        "values": _numbers(training.values, policy),
        "ref_logprobs": _numbers(training.ref_logprobs, policy),
        "rewards": _numbers(training.rewards, policy),
        "versions": _numbers(ledger.versions, policy & (ledger.versions >= 0)) if several_versions else None,
    }


def _with_images(pieces: list[str], ledger: Ledger) -> list[str]:
    """Of an image its first token says how many it has, and the others nothing: they all read alike."""
    for span in ledger.media:
        length = span.end - span.start
        pieces[span.start : span.end] = [f"[image, {length} tokens]", *[""] * (length - 1)]
    return pieces


def _numbers(values: Array | None, policy: Array) -> list[float | None] | None:
    """Numbers of the policy's tokens; null elsewhere and where nothing was computed."""
    if values is None:
        return None
    rounded = np.round(values.astype(np.float64), _DIGITS) + 0.0  # + 0.0: there is no minus 0 to read
    cells = rounded.astype(object)
    cells[~(policy & np.isfinite(rounded))] = None
    numbers: list[float | None] = cells.tolist()
    return numbers
