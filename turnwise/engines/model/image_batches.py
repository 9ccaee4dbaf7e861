"""Images of several conversations through a vision tower in one call, where that gives the features of each alone."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from turnwise.engines.model.policy_model import Features
from turnwise.engines.model.transformers.probe import alike
from turnwise.errors import EngineError
from turnwise.ledger import Media

MOST_IMAGES = 64
MOST_VALUES = 1 << 23
"""Numbers that processors made of the images of one call: of four with 512 x 512 pixels, which fill a GPU alone."""
FEW = 16
"""An array of so few numbers describes an image, such as its height and width in patches."""

Encode = Callable[[Sequence[Media]], list[Features]]
"""encode(images): the features of each, from a single call of the tower."""
Form = tuple[object, ...]


class ImageBatches:
    """What was found of a tower's batches; copies of a model share it.

    On the CPU images go together that are alike in form, two, four, eight and so on of them. The first batch of each
    number is also computed image by image: unless every bit is the same, so many never go together. Which kernel
    computes a form depends on shapes and threads alone, not on the pixels. On a GPU images go together where their
    arrays can be joined, and the first batch must agree to rounding.
    """

    def __init__(self) -> None:
        self._same: dict[Form, bool] = {}

    def __deepcopy__(self, copies: dict[int, object]) -> "ImageBatches":
        return self

    def encode(self, media: Sequence[Media], encode: Encode, *, exact: bool) -> Iterator[tuple[Media, Features]]:
        """The features of each image, in any order; `exact` for those bits that each has alone."""
        groups: dict[Form, list[Media]] = defaultdict(list)
        for image in media:
            groups[_form(image, exact)].append(image)
        for form, group in groups.items():
            start = 0
            while start < len(group):
                batch = self._next(form, group[start:], exact)
                yield from zip(batch, self._encode(_named(form, batch, exact), batch, encode, exact), strict=True)
                start += len(batch)

    def _next(self, form: Form, group: Sequence[Media], exact: bool) -> Sequence[Media]:
        """The first images of a group that go together."""
        values, count = 0, 0
        for image in group[:MOST_IMAGES]:
            values += sum(array.size for array in image.arrays.values())
            if count and values > MOST_VALUES:
                break
            count += 1
        if exact:
            count = 1 << count.bit_length() - 1
        while count > 1 and self._same.get(_named(form, group[:count], exact)) is False:
            count = count // 2 if exact else 1
        return group[:count]

    def _encode(self, name: Form, batch: Sequence[Media], encode: Encode, exact: bool) -> list[Features]:
        if len(batch) == 1 or name in self._same:
            return encode(batch)
        alone = [encode([image])[0] for image in batch]
        try:
            together = encode(batch)
        except EngineError:  # it takes one at a time
            self._same[name] = False
            return alone
        same = torch.equal if exact else alike
        pairs = (
            pair
            for one, other in zip(alone, together, strict=True)
            for pair in zip((one.rows, *one.deep), (other.rows, *other.deep), strict=True)
        )
        self._same[name] = all(same(one.detach(), other.detach()) for one, other in pairs)
        return alone


def joined_arrays(media: Sequence[Media], device: torch.device) -> dict[str, Tensor]:
    """The arrays of images that go together: each family counts images, or their parts, along the first axis."""
    if len(media) == 1:
        return {name: torch.tensor(array, device=device) for name, array in media[0].arrays.items()}
    arrays = [image.arrays for image in media]
    return {
        name: torch.from_numpy(np.concatenate([each[name] for each in arrays])).to(device) for name in media[0].arrays
    }


def _form(image: Media, exact: bool) -> Form:
    """What images have in common that can go together; if `exact`, all that a kernel may be chosen by."""
    parts: list[object] = []
    for name, array in image.arrays.items():
        parts += (name, array.dtype.str, array.shape if exact else array.shape[1:])
        if exact and array.size <= FEW:
            parts.append(array.tobytes())
    return tuple(parts)


def _named(form: Form, batch: Sequence[Media], exact: bool) -> Form:
    return (form, len(batch), torch.get_num_threads()) if exact else (form,)
