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

Encode = Callable[[Sequence[Media]], list[Features]]
"""encode(images): the features of each, from a single call of the tower."""
Form = tuple[object, ...]


class ImageBatches:
    """What was found of a tower's batches; copies of a model share it.

    Images whose arrays can be joined go together: a family that packs patches takes images of all sizes at once, others
    those of one size. The first batch of each form is also computed image by image: unless the two agree to rounding,
    such images go one at a time. They do not agree to the last bit: the last numbers of a row of memory are rounded by
    other instructions than those before, and which they are depends on how many images there are.
    """

    def __init__(self) -> None:
        self._alike: dict[Form, bool] = {}

    def __deepcopy__(self, copies: dict[int, object]) -> "ImageBatches":
        return self

    def encode(self, media: Sequence[Media], encode: Encode) -> Iterator[tuple[Media, Features]]:
        """The features of each image, in any order."""
        groups: dict[Form, list[Media]] = defaultdict(list)
        for image in media:
            groups[_form(image)].append(image)
        for form, group in groups.items():
            start = 0
            while start < len(group):
                batch = group[start : start + self._most(form, group[start : start + MOST_IMAGES])]
                yield from zip(batch, self._encode(form, batch, encode), strict=True)
                start += len(batch)

    def _most(self, form: Form, group: Sequence[Media]) -> int:
        """How many images of a group go together."""
        if self._alike.get(form) is False:
            return 1
        values = np.cumsum([sum(array.size for array in image.arrays.values()) for image in group])
        return max(1, int(np.searchsorted(values, MOST_VALUES, side="right")))

    def _encode(self, form: Form, batch: Sequence[Media], encode: Encode) -> list[Features]:
        if len(batch) == 1 or form in self._alike:
            return encode(batch)
        alone = [encode([image])[0] for image in batch]
        try:
            together = encode(batch)
        except EngineError:  # it takes one at a time
            self._alike[form] = False
            return alone
        pairs = (
            pair
            for one, other in zip(together, alone, strict=True)
            for pair in zip((one.rows, *one.deep), (other.rows, *other.deep), strict=True)
        )
        self._alike[form] = all(alike(one.detach(), other.detach()) for one, other in pairs)
        return alone


def joined_arrays(media: Sequence[Media], device: torch.device) -> dict[str, Tensor]:
    """The arrays of images that go together: each family counts images, or their parts, along the first axis."""
    if len(media) == 1:
        return {name: torch.tensor(array, device=device) for name, array in media[0].arrays.items()}
    arrays = [image.arrays for image in media]
    return {
        name: torch.from_numpy(np.concatenate([each[name] for each in arrays])).to(device) for name in media[0].arrays
    }


def _form(image: Media) -> Form:
    return tuple((name, array.dtype.str, array.shape[1:]) for name, array in image.arrays.items())
