"""Every token of a trajectory with its text and what was computed for it: nothing here is tokenised again."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.ext.board.columns import Array
from turnwise.ext.board.conversation import read_trajectory
from turnwise.ext.board.images import Pictures
from turnwise.ext.board.json_values import clean_text
from turnwise.ext.board.table import Table
from turnwise.ledger import TokenTrainingData
from turnwise.storage.run_dir import RunDir
from turnwise.types import Ledger, Origin, Trajectory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER, TOKENS = "tokenizer.json", "tokens.json"
_KEPT = 2
"""Tokenizers in memory; one with 150,000 tokens takes about 100 MB."""
_DIGITS = 6

Pieces = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How ids become text; `problem` says why they do not."""

    pieces: Pieces
    ids_are_real: bool
    problem: str | None = None


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


# --- the text of tokens -----------------------------------------------------------------------------------------------


_lock = threading.Lock()
_decoders: dict[Path, tuple[tuple[int, int], TokenDecoder]] = {}


def decoder_of(run: RunDir) -> TokenDecoder:
    """How this run's ids are decoded: an imported run's own list, else its tokenizer, else the ids themselves."""
    for name, read in ((TOKENS, _from_list), (TOKENIZER, _from_tokenizer)):
        path = run.path / name
        try:
            status = path.stat()
        except OSError:
            continue
        stamp = (status.st_mtime_ns, status.st_size)
        with _lock:
            cached = _decoders.pop(path, None)
        if cached is None or cached[0] != stamp:
            cached = (stamp, read(path))
        with _lock:
            while len(_decoders) >= _KEPT:
                del _decoders[next(iter(_decoders))]  # the one used longest ago
            _decoders[path] = cached
            return cached[1]
    return TokenDecoder(_numbered, True)


def _numbered(ids: Sequence[int]) -> list[str]:
    return [f"#{token}" for token in ids]


def _from_list(path: Path) -> TokenDecoder:
    try:
        words = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return TokenDecoder(_numbered, False, f"{path.name} cannot be read: {error}")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return TokenDecoder(_numbered, False, f"{path.name} is not a list of texts")
    return TokenDecoder(lambda ids: [words[i] if 0 <= i < len(words) else f"#{i}" for i in ids], False)


def _from_tokenizer(path: Path) -> TokenDecoder:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower for a file it cannot use
        return TokenDecoder(_numbered, True, f"{path.name} cannot be used: {error}")
    return TokenDecoder(lambda ids: decode_tokens(tokenizer, ids), True)


def decode_tokens(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[str]:
    """The text each token adds; joined they are the text of all. A character of several tokens stands at its last.

    Bytes that are no UTF-8 may change the text before them in the decoders of some tokenizers; then each token is
    decoded alone, with a replacement character for half a character.
    """
    pieces: list[str] = []
    start = 0
    for end in range(len(ids) + 1):
        if end < len(ids) and tokenizer.id_to_token(ids[end]) is not None:
            continue
        pieces += _decode_known(tokenizer, list(ids[start:end]))
        if end < len(ids):
            pieces.append(f"#{ids[end]}")  # no token of this tokenizer
        start = end + 1
    return pieces


def _decode_known(tokenizer: "Tokenizer", ids: list[int]) -> list[str]:
    from tokenizers.decoders import DecodeStream

    if not ids:
        return []
    whole: str = tokenizer.decode(ids, skip_special_tokens=False)
    stream = DecodeStream(skip_special_tokens=False)
    try:
        pieces = [stream.step(tokenizer, token) or "" for token in ids]
    except Exception:  # the library has no narrower class for a text that does not grow at its end only
        pieces = []
    joined = "".join(pieces)
    if not pieces or not whole.startswith(joined):
        return [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    pieces[-1] += whole[len(joined) :]  # bytes of a character that never became whole
    return pieces
