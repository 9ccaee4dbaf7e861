"""The images of an episode as a page draws them: what tools read and gave back, crops on their source, and targets."""

import base64
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from turnwise.errors import DataError
from turnwise.image_sources import kept_name
from turnwise.storage.images import images_for
from turnwise.storage.kept_images import stored_name
from turnwise.types import CallRecord, Image, Message, Sample
from turnwise.web.columns import clean_text
from turnwise.web.json_values import plain, plain_text
from turnwise.web.pictures import Pictures, shown_source

Json = dict[str, Any]
MOST_TARGETS = 64
_VERIFIED = "verified"


class CallImages:
    """The pictures of one episode's calls, each with the part of which source it shows."""

    def __init__(self, pictures: Pictures, sample: Sample) -> None:
        self._pictures = pictures
        self._sample = sample
        self._known: dict[str, dict[str, str | None]] = {}
        """By tool, and by the name that the tool's session has for it."""

    def images(self, record: CallRecord, reply: Message | None) -> list[Json]:
        """Those that a call's info tells of; else those its reply shows."""
        shown = [] if reply is None else list(reply.images)
        recorded = record.info.get("images")
        recorded = [one for one in recorded if isinstance(one, dict)] if isinstance(recorded, list) else []
        if recorded:
            same = len(recorded) == len(shown)  # then the reply shows them in this order
            sources = self._sources_of(record.call.name)
            return [
                self._recorded(one, shown[number] if same else None, sources) for number, one in enumerate(recorded)
            ]
        return [self._shown(image) for image in shown]

    def sources(self) -> list[Json]:
        """The images that tools read, each once: `[{"name", "url"}]`. Those that the prompt shows are among them."""
        tools = list(self._sample.tools_kwargs) or [""]  # a tool of which the row says nothing reads its images
        found = {url: name for tool in tools for name, url in self._sources_of(tool).items()}
        return [{"name": clean_text(name), "url": url} for url, name in found.items() if url is not None]

    def _sources_of(self, tool: str) -> dict[str, str | None]:
        if tool not in self._known:
            try:
                found = images_for(self._sample, self._sample.tools_kwargs.get(tool, {}))
            except DataError:  # another tool's word for something else
                found = {}
            self._known[tool] = {name: self._pictures.url(image.source) for name, image in found.items()}
        return self._known[tool]

    def _recorded(self, one: Json, image: Image | None, sources: dict[str, str | None]) -> Json:
        url = self._pictures.file_url(one.get("file"))
        if url is None and isinstance(one.get("data"), str):
            url = self._pictures.url(one["data"])
        given = None if image is None else self._pictures.url(image.source)
        provenance = plain_text(str(one.get("provenance") or "")) or None
        claim = one.get("unverified")
        claimed = isinstance(claim, dict) or provenance not in (None, _VERIFIED)
        told = claim if isinstance(claim, dict) else one
        source = told.get("source")
        steps = told.get("steps")
        return {
            "url": given if url is None else url,
            "shown_url": None if url is None or given is None or image is None or _is_same(one, image) else given,
            "name": plain_text(str(one.get("name") or "")),
            "size": _size(one.get("size")),
            "source_url": sources.get(source) if isinstance(source, str) else None,
            "source_size": _size(one.get("source_size")),
            "provenance": provenance,
            "claimed": claimed,
            "box": box_of(told.get("box")),
            "matrix": None if claimed else _numbers(one.get("matrix"), 6),
            "steps": plain(steps if isinstance(steps, list) else []),
        }

    def _shown(self, image: Image) -> Json:
        inline = kept_name(image.source) is None and image.source.startswith("data:")
        name = shown_source(image.source if inline else PurePath(image.source).name)
        nothing = ("shown_url", "size", "source_url", "source_size", "provenance", "box", "matrix")
        found: Json = dict.fromkeys(nothing)
        return found | {"url": self._pictures.url(image.source), "name": name, "claimed": False, "steps": []}


def target_boxes(sample: Sample) -> list[list[float]]:
    """Where the evidence lies in what tools read, as the ground truth or extra_info has it; [] where neither has."""
    truth, extra = sample.ground_truth, sample.info.get("extra_info")
    holders = [one for one in (truth, extra) if isinstance(one, Mapping) and "target_boxes" in one]
    given = holders[0]["target_boxes"] if holders else None
    boxes = [box_of(one) for one in given[:MOST_TARGETS]] if isinstance(given, list | tuple) else []
    return [box for box in boxes if box is not None]


def box_of(value: Any) -> list[float] | None:
    """[left, upper, right, lower] of a region that is not empty; None for anything else."""
    box = _numbers(value, 4)
    return box if box is not None and box[0] < box[2] and box[1] < box[3] else None


def _is_same(one: Json, image: Image) -> bool:
    """Whether the model was shown the picture that the call's record keeps; a probe shows it another."""
    if isinstance(one.get("data"), str):
        return bool(one["data"] == image.source)
    if (name := kept_name(image.source)) is not None:
        return bool(name == one.get("file"))
    head, _, data = image.source.partition(",")
    if not head.endswith(";base64"):
        return True  # a file: nothing but the tool's own word names it
    try:
        return stored_name(base64.b64decode(data, validate=True)) == one.get("file")
    except ValueError:
        return True  # no picture, which is then what the page says


def _size(value: Any) -> list[float] | None:
    sides = _numbers(value, 2)
    return sides if sides is not None and min(sides) > 0 else None


def _numbers(value: Any, count: int) -> list[float] | None:
    if not isinstance(value, list | tuple) or len(value) != count:
        return None
    good = all(isinstance(one, int | float) and not isinstance(one, bool) and _is_finite(one) for one in value)
    return list(value) if good else None


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any picture
        return False
