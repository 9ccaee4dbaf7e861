"""Samples in batches, shuffled anew each epoch, in an order that a resumed run continues exactly."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from turnwise.config.choices import Overlong
from turnwise.errors import DataError
from turnwise.types import Sample

if TYPE_CHECKING:
    from turnwise.data.files import Split


def load_samples(
    paths: Iterable[str | Path],
    *,
    split: "Split | None" = None,
    prompt_key: str,
    default_source: str | None = None,
    images_from: str | None = None,
    most_inline: int | None = None,
) -> list[Sample]:
    """Every row of every file as a sample; the first one that cannot be used raises. Of folders and hub datasets with
    several splits, `split` is read.

    Images that rows hold themselves stay in memory, encoded: `most_inline` bytes of them at most, or half of what the
    machine has. Files and members of tars are read when they are needed.
    """
    from turnwise.data.files import data_files
    from turnwise.data.images.cells import ImageCells
    from turnwise.data.rows import RowError, name_files, read_rows
    from turnwise.data.samples import misspelt, to_sample

    samples: list[Sample] = []
    images = ImageCells(images_from)
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if most_inline is None else most_inline
    for path, name in name_files(data_files(paths, split)).items():
        for row in read_rows(path, label=name):
            for field, problem in misspelt(row.values, prompt_key=prompt_key):
                raise RowError(row, field, problem)
            samples.append(to_sample(row, prompt_key=prompt_key, default_source=default_source, images=images))
            if images.inline_bytes > most:
                raise DataError(
                    f"{name}: by row {row.number} its images take {images.inline_bytes / 2**30:.1f} GiB, and all would "
                    "stay in memory: `turnwise data extract-images` puts them into files"
                )
    return samples


CHARACTERS_A_TOKEN = 100
"""No text has so many to a token; a prompt beyond it is too long without being tokenised, which may take minutes."""


def drop_overlong(
    samples: Sequence[Sample], count_tokens: Callable[[Sample], int], limit: int, mode: Overlong
) -> tuple[list[Sample], int]:
    """(the samples whose prompt has at most `limit` tokens, how many were dropped)."""
    short: list[Sample] = []
    shortest: int | None = None
    for sample in samples:
        least = sum(len(message.text) for message in sample.prompt) // CHARACTERS_A_TOKEN
        tokens = least if least > limit else count_tokens(sample)
        if tokens <= limit:
            short.append(sample)
        elif mode is Overlong.error:
            about = "at least " if tokens == least else ""
            raise DataError(
                f"{sample.id}: the prompt has {about}{tokens} tokens, more than data.max_prompt_tokens={limit}"
            )
        else:
            shortest = tokens if shortest is None else min(shortest, tokens)
    if not short and shortest is not None:
        raise DataError(
            f"all {len(samples)} prompts are longer than data.max_prompt_tokens={limit}; the shortest has {shortest}"
        )
    return short, len(samples) - len(short)


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Where a loader stands: `position` samples of `epoch` have been given out. The rest says of which loader."""

    epoch: int
    position: int
    fingerprint: str
    seed: int
    batch_size: int
    shuffle: bool


class Loader:
    """Endless batches: the epochs follow each other and are cut into batches of equal size.

    A batch that an epoch cannot fill is completed from the next one, so every epoch gives each sample exactly once.
    No batch holds a sample twice: two equal samples in one step would draw the same noise.
    """

    def __init__(self, samples: Sequence[Sample], batch_size: int, seed: int, shuffle: bool) -> None:
        if batch_size < 1:
            raise DataError(f"a batch of {batch_size} samples cannot be made")
        if batch_size > len(samples):
            raise DataError(f"a batch of {batch_size} samples cannot be made from {len(samples)}")
        ids = [sample.id for sample in samples]
        if len(set(ids)) < len(ids):
            raise DataError("two samples have the same id")
        self._samples = list(samples)
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = hashlib.blake2b("\0".join(ids).encode(), digest_size=16).hexdigest()
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def size(self) -> int:
        """The number of samples in one epoch."""
        return len(self._samples)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Sample]:
        indices = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        if self._position >= len(self._samples):
            self._position -= len(self._samples)
            self._epoch += 1
            self._order = self._order_of(self._epoch, before=self._order)
            indices += self._order[: self._position]
        return [self._samples[index] for index in indices]

    def state(self) -> LoaderState:
        """What `restore` needs to go on from here."""
        return LoaderState(self._epoch, self._position, self._fingerprint, self._seed, self._batch_size, self._shuffle)

    def restore(self, state: LoaderState) -> None:
        """Go on exactly where the loader that gave `state` stood; a loader of other data or settings refuses."""
        mine = self.state()
        if state.fingerprint != mine.fingerprint:
            raise DataError("cannot continue: the data files are not those of the interrupted run")
        for name in ("seed", "batch_size", "shuffle"):
            then, now = getattr(state, name), getattr(mine, name)
            if then != now:
                raise DataError(f"cannot continue: {name} was {then} in the interrupted run and is {now} now")
        consumed = state.epoch * len(self._samples) + state.position
        if state.epoch < 0 or not 0 <= state.position < len(self._samples) or consumed % self._batch_size:
            raise DataError(f"cannot continue: no batch ends at epoch {state.epoch}, position {state.position}")
        self._epoch, self._position = state.epoch, state.position
        self._order = self._order_of(state.epoch)

    def _order_of(self, epoch: int, before: list[int] | None = None) -> list[int]:
        """The indices of an epoch in order; `before` is the order of the epoch before, when it is known.

        The epoch's first batch may have begun with the tail of the epoch before; samples of that tail come later
        here. Only the first `batch_size` places change by that. With at least two batches to an epoch its tail is
        therefore that of the plain shuffle and one epoch back is enough to know it; else all are gone through.
        """
        size = len(self._samples)
        order = before or []
        first = epoch if before else max(epoch - 1, 0) if size >= 2 * self._batch_size else 0
        for number in range(first, epoch + 1):
            begun = number * size % self._batch_size
            order = _apart(self._shuffled(number), order[size - begun :], self._batch_size - begun)
        return order

    def _shuffled(self, epoch: int) -> list[int]:
        """Sorted by a hash of (seed, epoch, id), which needs no random state and is the same everywhere."""
        indices = list(range(len(self._samples)))
        if not self._shuffle:
            return indices
        prefix = f"{self._seed}/{epoch}/"
        return sorted(indices, key=lambda index: hashlib.blake2b((prefix + self._samples[index].id).encode()).digest())


def _apart(order: list[int], tail: list[int], count: int) -> list[int]:
    """`order` with its first `count` members free of those in `tail`."""
    late = set(tail)
    head = [index for index in order if index not in late][:count]
    chosen = set(head)
    return head + [index for index in order if index not in chosen]
