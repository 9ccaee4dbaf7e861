"""The text of a run's tokens, from what lies in its folder: its tokenizer, or an imported run's own list of texts."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.storage.run_dir import TOKENIZER, RunDir

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENS = "tokens.json"
"""Texts of the made-up token ids of an imported run, by id."""
_KEPT = 2
"""Tokenizers in memory; one with 150,000 tokens takes about 100 MB."""

Pieces = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How ids become text; `problem` says why they do not."""

    pieces: Pieces
    ids_are_real: bool
    problem: str | None = None


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
