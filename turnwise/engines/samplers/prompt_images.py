"""The images of one turn as a sampler needs them: where its tokens are placed, and features until they are fed."""

import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.model.image_batches import MOST_IMAGES
from turnwise.engines.model.image_features import Stretch, joined_features, joined_positions, three_axes
from turnwise.engines.model.policy_model import Features, ImageFeatures, PolicyModel
from turnwise.errors import EngineError
from turnwise.ledger import Media, MediaSpan

AHEAD = 4096
"""Features that are computed for prompts before they enter: of large images a few, since each keeps a device busy."""


class PromptImages:
    """`PromptImages(model, ids, spans)`: encodes an image when its tokens are fed, at the latest."""

    def __init__(self, model: PolicyModel, token_ids: NDArray[np.int64], media: Sequence[MediaSpan]) -> None:
        self._model, self._media, self._count = model, tuple(media), len(token_ids)
        # With one token more, which stands where the first one will that is written.
        placed = model.positions(np.append(token_ids, token_ids[-1]), self._media)
        self._places = placed[..., :-1]
        self.shift = int(placed[..., -1].max()) - self._count
        """What is added to where a token stands behind the prompt, for its position on every axis."""
        self._features: dict[MediaSpan, Features] = {}

    def encode(self, fed: int = 0) -> None:
        """Have the features of every image of which a token is not among the first `fed`."""
        try:
            self._encode([span for span in self._media if span.end > fed])
        except torch.OutOfMemoryError as error:
            raise EngineError("no memory is left to encode an image: lower engine.memory_fraction") from error

    def forget(self) -> None:
        """Forget all features: the model has other weights."""
        self._features.clear()

    def stretch(self, start: int, end: int) -> Stretch:
        """The image features in these tokens of the sequence; those of an image that ends there are held no longer."""
        inside = [span for span in self._media if span.start < end and span.end > start]
        self._encode(inside)
        features = [(span, self._features[span]) for span in inside]
        for span in (span for span in inside if span.end <= end):
            del self._features[span]
        return Stretch(features, start, end)

    def _encode(self, spans: Sequence[MediaSpan]) -> None:
        missing = [span for span in spans if span not in self._features]
        self._features.update(zip(missing, self._model.encode_images([span.media for span in missing]), strict=True))

    def positions(self, start: int, end: int) -> NDArray[np.int64]:
        """Of these tokens of the sequence, those written behind the prompt too."""
        behind = np.arange(max(start, self._count), end) + self.shift
        prompt = self._places[..., start:end]
        if not len(behind):
            return prompt
        return np.concatenate((prompt, behind if prompt.ndim == 1 else three_axes(behind)), axis=-1)


def image_inputs(
    stretches: Sequence[tuple[int, int, PromptImages | None]], device: torch.device
) -> tuple[Tensor, ImageFeatures | None]:
    """Of stretches (start, end) of sequences laid end to end, some with images: positions, and the images' features."""
    places = [
        np.arange(start, end) if prompt_images is None else prompt_images.positions(start, end)
        for start, end, prompt_images in stretches
    ]
    parts = [
        Stretch((), start, end) if prompt_images is None else prompt_images.stretch(start, end)
        for start, end, prompt_images in stretches
    ]
    return torch.from_numpy(joined_positions(places)), joined_features(parts, device)


def encode_ahead(model: PolicyModel, waiting: Iterable[tuple[Sequence[MediaSpan], int]], most: int) -> None:
    """Have the images of the first `most` prompts that wait encoded together, and kept with the model: of each prompt
    those that are not among its first tokens, which a cache holds.

    One that cannot be encoded is named when its own prompt enters, and one for which there is no memory now is tried
    again then.
    """
    coming: dict[str, Media] = {}
    features = 0
    for media, fed in itertools.islice(waiting, most):
        for image in (span.media for span in media if span.end > fed):
            features += 0 if image.digest in coming else image.features
            coming[image.digest] = image
        if len(coming) >= MOST_IMAGES or features >= AHEAD:
            break
    with suppress(EngineError, torch.OutOfMemoryError):
        model.encode_images([*coming.values()])
