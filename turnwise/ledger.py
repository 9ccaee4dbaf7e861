"""The tokens of one sequence as parallel arrays with one writer: who wrote each, under which weights; its images."""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

A = TypeVar("A", bound=NDArray[Any])

NO_VERSION = -1
"""The version of a token that no weights of ours wrote."""


class Origin(enum.IntEnum):
    """Who wrote a token. Only POLICY tokens are ever trained."""

    PROMPT = 0
    POLICY = 1
    TOOL = 2
    USER = 3
    TEMPLATE = 4


@dataclass(frozen=True, slots=True)
class VersionRun:
    """Tokens in a row that one version of the weights wrote."""

    version: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Media:
    """One image, prepared for one model; whoever holds it keeps it alive, and siblings of a group share one.

    `Media("5d41...", b"\\x89PNG...", token_ids=[151655] * 64, takes=[True] * 64, arrays={"pixel_values": ...})`
    """

    digest: str
    content: bytes
    """The encoded image as it was shown: for engines that prepare images themselves, and for the record."""
    token_ids: NDArray[np.int64]
    """The block of tokens that stands for it, row and column marks included where a model has them."""
    takes: NDArray[np.bool_]
    """Which tokens of the block are replaced by the image's features, in order."""
    arrays: Mapping[str, NDArray[Any]]
    """What the model's processor made of this one image, by the names its `get_image_features` takes."""

    @property
    def features(self) -> int:
        """How many rows of features it has."""
        return int(self.takes.sum())


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """An image at its place: its block begins at token `start` of a sequence, or of a batch."""

    media: Media
    start: int

    @property
    def end(self) -> int:
        """The index of the first token behind the image."""
        return self.start + len(self.media.token_ids)

    def shifted(self, by: int) -> "MediaSpan":
        """The same image in a sequence that begins elsewhere."""
        return MediaSpan(self.media, self.start + by)


def check_places(spans: Sequence[MediaSpan], token_ids: NDArray[np.int64]) -> None:
    """ValueError unless every image's block stands where its span says, in order and without overlap."""
    before = 0
    for span in spans:
        if span.start < before or span.end > len(token_ids):
            raise ValueError(f"an image at tokens {span.start} to {span.end} of {len(token_ids)}, after {before}")
        if not np.array_equal(token_ids[span.start : span.end], span.media.token_ids):
            raise ValueError(f"the tokens {span.start} to {span.end} are not those of image {span.media.digest}")
        before = span.end


@dataclass(frozen=True, slots=True, eq=False)
class TokenTrainingData:
    """What training computed for the tokens of a ledger, written once by `training.sequences.write_back`.

    Every array is as long as the ledger, 0.0 off the policy's tokens and nan where a token was not computed; None
    where nothing of the kind was: `TokenTrainingData(logprobs=[0.0, 0.0, -0.31], advantages=[0.0, 0.0, 0.7])`.
    What is given is copied, in single precision, and cannot be changed.
    """

    logprobs: NDArray[np.float32] | None = None
    """The learner's, before the first update of the step; None when it computed the sequence only after that."""
    new_logprobs: NDArray[np.float32] | None = None
    """The learner's in the last update that used the token."""
    ref_logprobs: NDArray[np.float32] | None = None
    entropies: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None
    rewards: NDArray[np.float32] | None = None
    """Token by token, beside the trajectory's own: minus the KL penalty, or what another system recorded."""

    def __post_init__(self) -> None:
        with np.errstate(over="ignore"):  # what another system computed may be beyond single precision: infinite
            for name in TOKEN_TRAINING:
                values = getattr(self, name)
                if values is not None:
                    object.__setattr__(self, name, _locked(np.array(values, dtype=np.float32)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenTrainingData):
            return NotImplemented
        return all(_equal(getattr(self, name), getattr(other, name)) for name in TOKEN_TRAINING)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenTrainingData, tuple(getattr(self, name) for name in TOKEN_TRAINING)


@dataclass(frozen=True, slots=True)
class RenderCheck:
    """The ledger compared with one full render of the final messages.

    `exact` means equal token by token; otherwise `position` is the first difference and `same_text` says whether only
    the pieces differ that words are written in. `problem` tells of one that nothing explains.
    """

    exact: bool
    same_text: bool
    position: int | None = None
    problem: str | None = None


TOKEN_TRAINING = tuple(field.name for field in fields(TokenTrainingData))

COLUMNS: dict[str, type[np.generic]] = {
    "token_ids": np.int64,
    "origins": np.int8,
    "turns": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
}
_NO_TOKENS: tuple[NDArray[Any], ...] = tuple(np.empty(0, dtype=dtype) for dtype in COLUMNS.values())


class Ledger:
    """The tokens of one sequence: id, origin, turn, logprob and version of each, in the order the model saw them.

    After a prompt of two tokens and a completion of one: `token_ids == [5, 6, 9]`,
    `origins == [PROMPT, PROMPT, POLICY]`, `turns == [0, 0, 0]`, `logprobs == [0.0, 0.0, -0.3]`,
    `versions == [-1, -1, 12]`. What is handed out is a read-only view: later tokens do not change it.
    """

    __slots__ = ("_ids", "_length", "_logprobs", "_media", "_origins", "_turns", "_versions", "training")

    training: TokenTrainingData | None
    """What training found out about these tokens; None for a sequence it did not use."""

    def __init__(self) -> None:
        self._length = 0
        self._ids, self._origins, self._turns, self._logprobs, self._versions = _NO_TOKENS
        self._media: tuple[MediaSpan, ...] = ()
        self.training = None

    @classmethod
    def of(
        cls,
        token_ids: ArrayLike,
        origins: ArrayLike,
        turns: ArrayLike,
        logprobs: ArrayLike,
        versions: ArrayLike,
        training: TokenTrainingData | None = None,
        media: Sequence[MediaSpan] = (),
    ) -> "Ledger":
        """One from whole columns, as a file has them, copied; ValueError for columns that no append could have made."""
        inputs = (token_ids, origins, turns, logprobs, versions)
        try:
            columns = [np.array(values, dtype=dtype) for values, dtype in zip(inputs, COLUMNS.values(), strict=True)]
        except OverflowError as error:
            raise ValueError(f"a ledger with a number out of range: {error}") from error
        if any(column.ndim != 1 for column in columns):
            raise ValueError("a ledger whose columns are not lists of numbers")
        lengths = {name: len(column) for name, column in zip(COLUMNS, columns, strict=True)}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"a ledger with {lengths}")
        others = columns[1] != Origin.POLICY
        if len(others) and not 0 <= columns[1].min() <= columns[1].max() < len(Origin):
            raise ValueError("a ledger with an unknown origin")
        least = {name: column.min(initial=0) for name, column in zip(COLUMNS, columns, strict=True)}
        if least["token_ids"] < 0 or least["turns"] < 0 or least["versions"] < NO_VERSION:
            raise ValueError("a ledger with a token id, a turn or a version below zero")
        if np.any(columns[3][others]) or np.any(columns[4][others] != NO_VERSION):
            raise ValueError("a ledger with logprobs or versions of tokens that are not the policy's")
        check_places(media, columns[0])
        return cls._holding(columns, training, tuple(media))

    @classmethod
    def _holding(
        cls, columns: Sequence[NDArray[Any]], training: TokenTrainingData | None, media: tuple[MediaSpan, ...]
    ) -> "Ledger":
        ledger = cls()
        ledger._ids, ledger._origins, ledger._turns, ledger._logprobs, ledger._versions = columns
        ledger._length, ledger.training, ledger._media = len(columns[0]), training, media
        return ledger

    def append(
        self,
        ids: ArrayLike,
        origin: Origin,
        turn: int,
        logprobs: ArrayLike | None = None,
        versions: Sequence[VersionRun] | int | None = None,
    ) -> None:
        """Policy tokens come with their logprobs and versions (runs, or one for all), others without.

        What is refused leaves nothing behind. Nothing else writes but `append_given`.
        """
        tokens = _whole_numbers(ids)
        count = tokens.size
        policy = origin is Origin.POLICY
        if policy != (logprobs is not None) or policy != (versions is not None):
            missing = "logprobs and versions" if logprobs is None else "versions"
            raise ValueError(f"{origin.name} tokens {f'need {missing}' if policy else 'have no logprobs or versions'}")
        if logprobs is None or versions is None:
            self._write(tokens, ((origin, count),), turn)
            return
        values = np.asarray(logprobs, dtype=np.float32)
        if values.shape != (count,):
            raise ValueError(f"{count} tokens with {values.size} logprobs")
        written = np.asarray(_per_token(versions, count), dtype=np.int32)
        start = self._length
        self._write(tokens, ((origin, count),), turn)
        if count:
            self._logprobs[start : self._length] = values
            self._versions[start : self._length] = written

    def append_given(self, spans: Sequence[tuple[Sequence[int], Origin]], turn: int) -> None:
        """Tokens of one turn that the policy did not write, span by span, as `append` takes each: quicker for many."""
        ids: list[int] = []
        for tokens, origin in spans:
            if origin is Origin.POLICY:
                raise ValueError("POLICY tokens need logprobs and versions")
            ids += tokens
        self._write(_whole_numbers(ids), [(origin, len(tokens)) for tokens, origin in spans], turn)

    def place_at(self, spans: Iterable[MediaSpan]) -> None:
        """Say where further images stand, behind the last one; ValueError when their tokens are not there."""
        media = (*self._media, *spans)
        check_places(media, self.token_ids)
        self._media = media

    def renew(self, prepare: Callable[[Media], Media]) -> None:
        """Have every image prepared again; ValueError when one is no longer shown with the tokens of the record."""
        media = tuple(MediaSpan(prepare(span.media), span.start) for span in self._media)
        check_places(media, self.token_ids)
        self._media = media

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """The images among the tokens, in order."""
        return self._media

    def shared_length(self, ids: NDArray[np.int64]) -> int:
        """How many of its tokens `ids` begins with."""
        length = min(self._length, len(ids))
        same = self._ids[:length] == ids[:length]
        return length if same.all() else int(same.argmin())

    def shift_turns(self, by: int) -> None:
        """Count its turns from there on: those of a branch follow the main conversation's."""
        self._turns = self._turns + np.int32(by)

    def _write(self, ids: NDArray[Any], origins: Iterable[tuple[Origin, int]], turn: int) -> None:
        """Tokens, how many of them each origin wrote; their logprobs and versions are as none has yet."""
        start, end = self._length, self._length + ids.size
        if start == end:
            return
        if end > len(self._ids):
            self._grow(end + end // 2 + 256)
        self._ids[start:end] = ids
        self._turns[start:end] = turn
        for origin, count in origins:
            self._origins[start : start + count] = origin
            start += count
        self._length = end

    def _grow(self, capacity: int) -> None:
        """New buffers: views handed out keep the old ones."""
        length, new = self._length, [np.empty(capacity, dtype=dtype) for dtype in COLUMNS.values()]
        old = (self._ids, self._origins, self._turns, self._logprobs, self._versions)
        for column, source in zip(new, old, strict=True):
            column[:length] = source[:length]
        self._ids, self._origins, self._turns, self._logprobs, self._versions = new
        self._logprobs[length:] = 0.0
        self._versions[length:] = NO_VERSION

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """What the model saw and wrote."""
        return _locked(self._ids[: self._length])

    @property
    def origins(self) -> NDArray[np.int8]:
        """The origin of each token, as values of Origin."""
        return _locked(self._origins[: self._length])

    @property
    def turns(self) -> NDArray[np.int32]:
        """The index of the turn that each belongs to."""
        return _locked(self._turns[: self._length])

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """The sampler's; 0.0 off the policy's tokens, nan where another system's record does not say."""
        return _locked(self._logprobs[: self._length])

    @property
    def versions(self) -> NDArray[np.int32]:
        """Which weights wrote each token; NO_VERSION off the policy's."""
        return _locked(self._versions[: self._length])

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """True exactly at the policy's tokens."""
        mask: NDArray[np.bool_] = self._origins[: self._length] == Origin.POLICY.value
        return mask

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ledger):
            return NotImplemented
        same = all(_equal(ours, theirs) for ours, theirs in zip(self._columns(), other._columns(), strict=True))
        placed = [[(span.media.digest, span.start) for span in ledger._media] for ledger in (self, other)]
        return same and placed[0] == placed[1] and self.training == other.training

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ledger({', '.join(f'{len(ids)} {origin.name} of turn {turn}' for origin, turn, ids in self.spans())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Ledger._holding, (self._columns(), self.training, self._media)

    def prefix(self, length: int) -> "Ledger":
        """The first tokens, without what training found out."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot cut {self._length} tokens after {length}")
        # It shares the buffers up to here, full as they are: an append to either does not reach the other.
        media = tuple(span for span in self._media if span.end <= length)
        return Ledger._holding([column[:length] for column in self._columns()], None, media)

    def spans(self) -> Iterator[tuple[Origin, int, NDArray[np.int64]]]:
        """Runs of equal origin and turn: (origin, turn, ids)."""
        ids, origins, turns = self.token_ids, self.origins, self.turns
        if not self._length:
            return
        changes = np.flatnonzero((origins[1:] != origins[:-1]) | (turns[1:] != turns[:-1])) + 1
        starts = [0, *changes.tolist()]
        whose = zip(origins[starts].tolist(), turns[starts].tolist(), strict=True)
        for (origin, turn), start, end in zip(whose, starts, [*starts[1:], self._length], strict=True):
            yield Origin(origin), turn, ids[start:end]

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self.token_ids, self.origins, self.turns, self.logprobs, self.versions


def _whole_numbers(ids: ArrayLike) -> NDArray[Any]:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"token ids are a row of whole numbers, not {array.ndim} dimensions of {array.dtype}")
    return array


def _per_token(versions: Sequence[VersionRun] | int, count: int) -> int | NDArray[np.int32]:
    if isinstance(versions, int):
        return versions
    if sum([run.tokens for run in versions]) != count:
        raise ValueError(f"{count} tokens with versions {tuple(versions)}")
    if len(versions) == 1:
        return versions[0].version
    return np.repeat(np.array([run.version for run in versions], dtype=np.int32), [run.tokens for run in versions])


def _locked(array: A) -> A:
    array.flags.writeable = False
    return array


def _equal(ours: NDArray[Any] | None, theirs: NDArray[Any] | None) -> bool:
    """Equal value by value, where nan (unknown) equals nan."""
    if ours is None or theirs is None:
        return ours is theirs
    return np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")
