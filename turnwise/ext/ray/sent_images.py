"""The images of turns at a sampler in an actor: each is sent to it once, as its file, and prepared there."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from turnwise.errors import DataError, EngineError
from turnwise.ledger import Media, MediaSpan

KEPT_BYTES = 256 << 20
"""Of encoded images: those that were not shown for the longest are forgotten, and asked for when they are shown."""

Placed = tuple[tuple[str, int], ...]
"""Digests of images and where each begins among the tokens of a turn."""


class ImageStore:
    """Images by digest, made ready by `prepare` off the event loop, once for all turns that show them."""

    def __init__(self, prepare: Callable[[bytes], Media], kept_bytes: int = KEPT_BYTES) -> None:
        self._prepare, self._kept_bytes = prepare, kept_bytes
        self._held: OrderedDict[str, tuple[int, asyncio.Task[Media]]] = OrderedDict()

    def take(self, contents: Mapping[str, bytes]) -> None:
        """Starts to prepare the images of these contents, and keeps them by digest."""
        for digest, content in contents.items():
            if digest not in self._held:
                making = asyncio.create_task(asyncio.to_thread(self._prepare, content))
                making.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to who shows it
                self._held[digest] = (len(content), making)

    def find(self, placed: Placed) -> "Sequence[asyncio.Task[Media]] | None":
        """Each image of a turn, ready or nearly so; None where one is not here."""
        if any(digest not in self._held for digest, _ in placed):
            return None
        for digest, _ in placed:
            self._held.move_to_end(digest)
        return [self._held[digest][1] for digest, _ in placed]

    def forget_some(self) -> None:
        """Keep no more than there is room for."""
        held = sum(size for size, _ in self._held.values())
        while held > self._kept_bytes:
            held -= self._held.popitem(last=False)[1][0]


async def at_their_places(placed: Placed, making: "Sequence[asyncio.Task[Media]]") -> tuple[MediaSpan, ...]:
    """The images of a turn as a sampler takes them."""
    try:  # shielded: the turn may be cancelled, and others show the same image
        ready = [await asyncio.shield(task) for task in making]
    except DataError as error:
        raise EngineError(f"an image that was prepared elsewhere cannot be here: {error}") from error
    return tuple(MediaSpan(media, start) for media, (_, start) in zip(ready, placed, strict=True))
