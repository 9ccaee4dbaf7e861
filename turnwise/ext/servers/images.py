"""Images for an engine that prepares them itself: a marker token for each, and whether it makes of them what we did."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import EngineError, EpisodeError
from turnwise.ledger import MediaSpan

MOST_SENT = 4096
"""Images of which is remembered that an engine was sent them: more than its own cache has room for."""


def with_markers(token_ids: NDArray[np.int64], media: Sequence[MediaSpan], marker: int) -> list[int]:
    """The tokens with each image's block as one `marker`, which such an engine puts the image's own block for.

    EpisodeError where the text has that token before an image: the engine would show the image there. The policy may
    have written it; behind the last image it stays what it is.
    """
    tokens: list[int] = []
    before = 0
    for span in media:
        text = token_ids[before : span.start]
        if strays := int((text == marker).sum()):
            raise EpisodeError(
                f"token {marker}, which marks an image, was written {strays} times as text: this engine would "
                "take it for the image's place"
            )
        tokens += [*text.tolist(), marker]
        before = span.end
    tokens += token_ids[before:].tolist()
    return tokens


def check_prompt(who: str, tokens: object, wanted: NDArray[np.int64]) -> None:
    """EngineError unless the engine says that it read the very tokens that are recorded."""
    if not isinstance(tokens, Sequence) or not all(type(token) is int for token in tokens):
        raise EngineError(f"{who} does not say which tokens it made of a prompt with images: {str(tokens)[:100]}")
    if len(tokens) != len(wanted):
        problem = f"{len(tokens)} tokens of a prompt with images that has {len(wanted)} here"
    else:
        unlike = np.flatnonzero(np.asarray(tokens, np.int64) != wanted)
        if not len(unlike):
            return
        problem = f"token {tokens[unlike[0]]} at {unlike[0]} of a prompt with images that has {wanted[unlike[0]]} here"
    raise EngineError(f"{who} makes {problem}: its image processor is set otherwise than the one in model.path")


class SentImages:
    """Which images an engine has been sent, by digest; it keeps them as long as it likes, so this is a guess."""

    def __init__(self) -> None:
        self._digests: dict[str, None] = {}

    def new(self, media: Sequence[MediaSpan]) -> set[str]:
        """Those of them that it has not."""
        return {span.media.digest for span in media} - self._digests.keys()

    def add(self, media: Sequence[MediaSpan]) -> None:
        """Notes that the engine has these images now."""
        for span in media:
            self._digests.pop(span.media.digest, None)
            self._digests[span.media.digest] = None
        while len(self._digests) > MOST_SENT:
            del self._digests[next(iter(self._digests))]

    def forget(self) -> None:
        """Notes that the engine has no image any more."""
        self._digests.clear()
