"""Blocks of tokens in the place of a template's image markers: the nth marker of a text shows the nth image."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnwise.chat.control_tokens import stand_in_for, texts_in, with_texts
from turnwise.chat.spans import REPLY_ORIGIN, Characters
from turnwise.chat.tokenizer import Encoding
from turnwise.errors import TemplateError
from turnwise.ledger import Ledger, Media, MediaSpan
from turnwise.types import Image, Message, Role

MediaOf = Mapping[Image, Media]
"""What the model's processor made of each image that messages hold."""
NO_MEDIA: MediaOf = {}


class Prompt(NamedTuple):
    """The tokens of a prompt, and the images among them."""

    ids: list[int]
    media: tuple[MediaSpan, ...] = ()


def place_images(ledger: Ledger, media: Sequence[Media]) -> None:
    """Say which images the blocks behind the last one stand for, in order; their tokens were appended before.

    ValueError when a block is not there: what the model would see is then not what the tokens say.
    """
    start = ledger.media[-1].end if ledger.media else 0
    tokens = np.where(ledger.loss_mask, -1, ledger.token_ids)  # the policy may write an image's token: it shows nothing
    spans: list[MediaSpan] = []
    for image in media:
        spans.append(MediaSpan(image, _find_block(image, tokens, start)))
        start = spans[-1].end
    ledger.place_at(spans)


def _find_block(image: Media, token_ids: NDArray[np.int64], start: int) -> int:
    """Where the image's tokens stand first, from `start` on."""
    block = image.token_ids
    for at in (start + np.flatnonzero(token_ids[start:] == block[0])).tolist() if len(block) else ():
        if np.array_equal(token_ids[at : at + len(block)], block):
            return int(at)
    raise ValueError(f"no tokens for image {image.digest} behind token {start}")


def images_in(messages: Sequence[Message]) -> list[Image]:
    """Every image of these messages, in order."""
    return [image for message in messages for image in message.images]


class SpelledMarkers:
    """Stand-ins for the image markers that messages merely spell, so that every other one is the template's.

    What users and tools spell is hidden already (`ControlTokenEscaper`). A policy may write the token, which is then a
    token like any other and shows nothing.
    """

    def __init__(self, marker: str, messages: Sequence[Message]) -> None:
        self._marker = marker
        spelled = [message for message in messages if message.role not in (Role.TOOL, Role.USER)]
        texts = [text for message in spelled for text in _texts_of(message)]
        self._stand_in = ""
        if any(marker in text for text in texts):
            self._stand_in = stand_in_for(len(marker), [*texts, *(message.text for message in messages)])

    def hide(self, message: Message) -> Message:
        """A message of the system or the assistant without markers."""
        if not self._stand_in or message.role in (Role.TOOL, Role.USER):
            return message
        calls = [
            replace(call, name=self._hide(call.name), arguments=_changed(call.arguments, self))
            for call in message.tool_calls
        ]
        return replace(
            message,
            content=with_texts(message, self._hide),
            tool_calls=tuple(calls),
            reasoning=message.reasoning and self._hide(message.reasoning),
            answer=message.answer and self._hide(message.answer),
        )

    def restore(self, text: str) -> str:
        """The text as it was written; positions stay what they were."""
        return text.replace(self._stand_in, self._marker) if self._stand_in else text

    def _hide(self, text: str) -> str:
        return text.replace(self._marker, self._stand_in)


def find_markers(text: str, marker: str, images: Sequence[Image]) -> list[int]:
    """Where the template shows each of these images; TemplateError when it does not show every one once."""
    positions, at = [], text.find(marker)
    while at >= 0:
        positions.append(at)
        at = text.find(marker, at + len(marker))
    if len(positions) != len(images):
        raise TemplateError(
            f"the chat template shows {len(positions)} images where the messages have {len(images)}: take the model's "
            "own template, or one that writes its image token once for each"
        )
    return positions


def media_of(images: Sequence[Image], media: MediaOf) -> list[Media]:
    """What was prepared of these images."""
    missing = [image.source for image in images if image not in media]
    if missing:
        raise ValueError(f"the image {missing[0][:64]} was not prepared before it was shown")
    return [media[image] for image in images]


def expand(encoding: Encoding, markers: Sequence[int], blocks: Sequence[Media]) -> tuple[Encoding, list[MediaSpan]]:
    """The same tokens with a block in the place of the marker at each of these characters."""
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    spans: list[MediaSpan] = []
    places = dict(zip(markers, blocks, strict=True))
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        block = places.pop(start, None)
        if block is None:
            ids.append(token)
            offsets.append((start, end))
            continue
        spans.append(MediaSpan(block, len(ids)))
        ids += block.token_ids.tolist()
        offsets += [(start, end)] * len(block.token_ids)
    if places:
        raise TemplateError("the tokenizer does not read the chat template's image marker as a token of its own")
    return Encoding(ids, offsets), spans


def with_images(
    places: Sequence[Characters], markers: Sequence[int], length: int, replies: Sequence[Message]
) -> list[Characters]:
    """Where replies stand in a text, the markers of their images included: an image is its writer's, like his words."""
    writers = [REPLY_ORIGIN[reply.role] for reply in replies for _ in reply.images]
    own = [
        (at, at + length, origin)
        for at, origin in zip(markers, writers, strict=True)
        if not any(start <= at < end for start, end, _ in places)
    ]
    return sorted([*places, *own])


def _texts_of(message: Message) -> list[str]:
    calls = [text for call in message.tool_calls for text in (call.name, *texts_in(call.arguments))]
    return [message.text, message.reasoning or "", message.answer or "", *calls]


def _changed(value: Any, spelled: SpelledMarkers) -> Any:
    if isinstance(value, dict):
        return {_changed(key, spelled): _changed(item, spelled) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item, spelled) for item in value]
    return spelled._hide(value) if isinstance(value, str) else value
