"""Features of images: kept while the tower is the same, and laid where they stand in a pass, whole or cut."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.model.policy_model import Features, ImageFeatures
from turnwise.ledger import MediaSpan

SpanFeatures = Sequence[tuple[MediaSpan, Features]]
"""The images of a sequence, each at its place in it, with its features."""


KEPT_BYTES = 512 << 20
"""Features that are kept for later passes."""


class FeatureCache:
    """Features by the digest of their image, the longest unused dropped beyond a budget; from any thread.

    Copies of a model share one, as long as none of them has got another tower: sampler, learner, reference and critic
    then encode an image once.
    """

    def __init__(self, budget: int = KEPT_BYTES) -> None:
        self._budget, self._bytes, self._lock = budget, 0, threading.Lock()
        self._found: OrderedDict[str, Features] = OrderedDict()

    def __deepcopy__(self, copies: dict[int, object]) -> "FeatureCache":
        return self

    def get(self, digest: str) -> Features | None:
        """What is kept of an image, now the most recently used."""
        with self._lock:
            features = self._found.get(digest)
            if features is not None:
                self._found.move_to_end(digest)
            return features

    def put(self, digest: str, features: Features) -> None:
        """Keeps the features of an image; those used least recently go when the budget is full."""
        with self._lock:
            if digest in self._found:  # another thread was faster
                return
            self._found[digest] = features
            self._bytes += _bytes(features)
            while self._bytes > self._budget and len(self._found) > 1:
                self._bytes -= _bytes(self._found.popitem(last=False)[1])


def _bytes(features: Features) -> int:
    return sum(tensor.nbytes for tensor in (features.rows, *features.deep))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens `start` to `end` of a sequence, as part of a pass."""

    images: SpanFeatures
    start: int
    end: int


def joined_features(stretches: Sequence[Stretch], device: torch.device) -> ImageFeatures | None:
    """The features in stretches that stand end to end; None for text alone."""
    places: list[NDArray[np.int64]] = []
    parts_used: list[tuple[Features, NDArray[np.int64]]] = []
    at = 0
    for stretch in stretches:
        for span, features in stretch.images:
            own = span.start + np.flatnonzero(span.media.takes)
            rows = np.flatnonzero((own >= stretch.start) & (own < stretch.end))
            if len(rows):
                places.append(own[rows] - stretch.start + at)
                parts_used.append((features, rows))
        at += stretch.end - stretch.start
    if not places:
        return None

    def joined(parts: Sequence[Tensor]) -> Tensor:
        cut = zip(parts, (rows for _, rows in parts_used), strict=True)
        return torch.cat([part[int(rows[0]) : int(rows[-1]) + 1].to(device) for part, rows in cut])

    deep = zip(*(features.deep for features, _ in parts_used), strict=True)
    where = torch.from_numpy(np.concatenate(places)).to(device)
    return ImageFeatures(
        where, joined([features.rows for features, _ in parts_used]), tuple(joined(parts) for parts in deep)
    )


def three_axes(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """[3, T] of positions that may be [T]: text stands at the same place on every axis."""
    return np.broadcast_to(positions, (3, positions.shape[-1]))


def joined_positions(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Of sequences or stretches end to end: [T], or [3, T] once any of them has three axes."""
    if any(part.ndim == 2 for part in parts):
        return np.concatenate([three_axes(part) for part in parts], axis=1)
    return np.concatenate(parts)
