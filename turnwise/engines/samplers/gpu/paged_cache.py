"""Which pages of the key and value pool belong to whom: running turns, kept conversations, prompts that begin alike.

Numbers only; the pool itself lies on the device. A page is held by every sequence that reads it, and only whole pages
of prompts are read by several, so none is ever copied. What nobody holds is free, or remembered by the digest of the
prompt it was computed for until its room is needed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.samplers.kv_cache import PREFIX_BLOCK
from turnwise.ledger import MediaSpan

Pages = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CachedConversation:
    """A conversation between turns: all its tokens, and the pages of the first `fed` of them."""

    token_ids: NDArray[np.int64]
    fed: int
    pages: Pages
    media: tuple[MediaSpan, ...] = ()


class PagedCache:
    """Pages 0 to n, each free, held (several times where shared) or only remembered."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.evicted = 0
        """Conversations whose pages were taken from them."""
        self._holders = np.zeros(pages, dtype=np.int32)
        self._free = np.arange(pages - 1, -1, -1, dtype=np.int32)
        """A stack; the first `_free_count` entries count."""
        self._free_count = pages
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._remembered: OrderedDict[int, None] = OrderedDict()
        """Pages that nobody holds and whose digest is known, the longest unused first."""
        self._kept: OrderedDict[str, CachedConversation] = OrderedDict()
        self.kept_pages = 0
        """Held by conversations between turns; a page that two of them share counts twice."""

    @property
    def unused(self) -> int:
        """Pages that can be taken without taking any from a conversation."""
        return self._free_count + len(self._remembered)

    def take(self, count: int) -> Pages | None:
        """So many pages, each held once; None when not even the last kept conversation can give enough."""
        if self.unused + self.kept_pages < count:
            return None
        while self.unused < count:
            if not self._kept:  # what they kept is also held by turns that run
                return None
            oldest = next(iter(self._kept))
            self.drop(oldest)
            self.evicted += 1
        while self._free_count < count:
            page, _ = self._remembered.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
            self._push(np.array([page], dtype=np.int32))
        self._free_count -= count
        pages = self._free[self._free_count : self._free_count + count].copy()
        self._holders[pages] = 1
        return pages

    def give(self, pages: Pages) -> None:
        """Hold these no more, one time each. Tails are forgotten before heads: a tail without its head is useless."""
        if not len(pages):
            return
        self._holders[pages] -= 1
        loose = pages[self._holders[pages] == 0]
        if not self._digest_of:
            self._push(loose)
            return
        plain: list[int] = []
        for page in reversed(loose.tolist()):
            if page in self._digest_of:
                self._remembered[page] = None
            else:
                plain.append(page)
        self._push(np.array(plain, dtype=np.int32))

    def _push(self, pages: Pages) -> None:
        self._free[self._free_count : self._free_count + len(pages)] = pages
        self._free_count += len(pages)

    def known(self, digests: Sequence[bytes]) -> int:
        """How many leading pages of a prompt there are."""
        for count, digest in enumerate(digests):
            if digest not in self._page_of:
                return count
        return len(digests)

    def hold(self, digests: Sequence[bytes]) -> Pages:
        """The pages of a prompt's first blocks, held once more."""
        pages = np.array([self._page_of[digest] for digest in digests], dtype=np.int32)
        for page in pages[self._holders[pages] == 0].tolist():
            del self._remembered[page]
        self._holders[pages] += 1
        return pages

    def share(self, digests: Sequence[bytes], pages: Pages) -> None:
        """Let prompts that begin alike find these pages, which are computed before anything that is asked for later."""
        for digest, page in zip(digests, pages.tolist(), strict=True):
            if digest not in self._page_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest

    def get(self, conversation: str) -> CachedConversation | None:
        """What is kept of a conversation."""
        return self._kept.get(conversation)

    def keep(self, conversation: str, entry: CachedConversation) -> None:
        """Keep what a turn held until the conversation goes on, is dropped, or its pages are needed."""
        self.drop(conversation)
        self._kept[conversation] = entry
        self.kept_pages += len(entry.pages)

    def resume(self, conversation: str) -> CachedConversation:
        """A kept conversation, whose pages the caller now holds."""
        entry = self._kept.pop(conversation)
        self.kept_pages -= len(entry.pages)
        return entry

    def begin(self, conversation: str, digests: Sequence[bytes], pages: int, *, spare: int) -> tuple[Pages, int] | None:
        """So many pages for a turn, and how many of its tokens they hold: those of the kept conversation, or else of a
        prompt that began with the same blocks. None, and nothing has changed, when fewer than `spare` would be left."""
        entry = self._kept.get(conversation)
        if entry is None:
            blocks = self.known(digests)
            held, fed = self.hold(digests[:blocks]), blocks * PREFIX_BLOCK
        else:
            held, fed = self.resume(conversation).pages, entry.fed
        wanted = max(pages - len(held), 0)
        more = self.take(wanted) if self.unused + self.kept_pages - wanted >= spare else None
        if more is not None:
            return np.concatenate((held, more)), fed
        if entry is None:
            self.give(held)
        else:
            self.keep(conversation, entry)
        return None

    def drop(self, conversation: str) -> None:
        """Forget a conversation; unknown names are fine."""
        entry = self._kept.pop(conversation, None)
        if entry is not None:
            self.kept_pages -= len(entry.pages)
            self.give(entry.pages)

    def forget(self) -> None:
        """Drop every conversation and every digest: what was computed is no longer true."""
        for conversation in list(self._kept):
            self.drop(conversation)
        loose = np.array(list(self._remembered), dtype=np.int32)
        self._remembered.clear()
        self._page_of.clear()
        self._digest_of.clear()
        self._push(loose)
