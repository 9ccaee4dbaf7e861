"""Images between a run and an episode worker: each crosses once, prepared, however many turns and siblings show it."""

import copyreg
import io
import itertools
import pickle
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from turnwise.ledger import Media
from turnwise.rollout.workers.packing import REDUCERS

Adopt = Callable[[Media], Media]
"""adopt(media): the same image as this process keeps it."""


class OutgoingImages:
    """What the other side has of ours, by number, for as long as anybody here holds it."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Media, int] = weakref.WeakKeyDictionary()
        self._gone: deque[int] = deque()
        self._count = itertools.count()
        self._table = {**copyreg.dispatch_table, **REDUCERS, Media: self._reduced}

    def packed(self, messages: list[object]) -> bytes:
        """Messages as `IncomingImages.unpacked` reads them, after the numbers of images that nobody holds any more."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        content = io.BytesIO()
        pickler = pickle.Pickler(content, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = self._table
        pickler.dump(gone)
        pickler.clear_memo()
        pickler.dump(messages)
        return content.getvalue()

    def _reduced(self, media: Media) -> tuple[Any, ...]:
        number = self._numbers.get(media)
        if number is not None:
            return image, (number,)
        number = self._numbers[media] = next(self._count)
        weakref.finalize(media, self._gone.append, number).atexit = False
        return image, (number, media.digest, media.content, media.token_ids, media.takes, dict(media.arrays))


class IncomingImages:
    """What the other side sent, until it says that nobody there holds it."""

    def __init__(self, adopt: Adopt | None) -> None:
        self._adopt, self._held = adopt, dict[int, Media]()

    def unpacked(self, content: bytes) -> list[Any]:
        """The messages, with every image in its place."""
        file = io.BytesIO(content)
        for number in pickle.load(file):
            del self._held[number]
        reader = _Reader(file)
        reader.image = self._image
        messages: list[Any] = reader.load()
        return messages

    def _image(self, number: int, *fields: Any) -> Media:
        if fields:
            media = Media(*fields)
            self._held[number] = media if self._adopt is None else self._adopt(media)
        return self._held[number]


class _Reader(pickle.Unpickler):
    image: Callable[..., Media]

    def find_class(self, module: str, name: str) -> Any:
        return self.image if (module, name) == (__name__, image.__name__) else super().find_class(module, name)


def image(number: int, *fields: Any) -> Media:
    """What stands for an image in a message; only `IncomingImages` knows which it is."""
    raise ValueError(f"image {number} was sent over a link, and is read without it")
