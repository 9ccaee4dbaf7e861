"""Conversations that cross between processes: of each turn that is asked for, what is new since the one before."""

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.samplers.request import Request
from turnwise.ledger import MediaSpan
from turnwise.rollout.workers.messages import Ask

Said = tuple[NDArray[np.int64], tuple[MediaSpan, ...]]
_NOTHING: Said = (np.empty(0, dtype=np.int64), ())


class Told:
    """The side that asks: what the other one knows of each conversation."""

    def __init__(self) -> None:
        self._said: dict[str, Said] = {}

    def ask(self, number: int, request: Request) -> Ask:
        """The request without what is known already: tokens that this sequence begins with, and images among them."""
        (ids, media), now = self._said.get(request.conversation, _NOTHING), request.token_ids
        if len(ids) > len(now) or not np.array_equal(ids, now[: len(ids)]):
            ids, media = _NOTHING
        self._said[request.conversation] = now, request.media
        new = request.media[len(media) :]
        return Ask(number, request.conversation, len(ids), now[len(ids) :], request.params, request.noise, new)

    def forget(self, conversation: str) -> None:
        """It will not be continued."""
        self._said.pop(conversation, None)


class Heard:
    """The side that is asked: all of each conversation so far, by its name."""

    def __init__(self) -> None:
        self.said: dict[str, Said] = {}

    def request(self, ask: Ask) -> Request:
        """The whole of it."""
        ids, media = self.said.get(ask.conversation, _NOTHING) if ask.known else _NOTHING
        said = np.concatenate((ids, ask.token_ids)) if len(ids) else ask.token_ids, (*media, *ask.media)
        self.said[ask.conversation] = said
        return Request(ask.conversation, said[0], ask.params, ask.noise, said[1])
