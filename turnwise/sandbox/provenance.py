"""Whether an image shows what its session says it shows: the claim is compared with the source's pixels, on the host.

A session's word on its images is its own. What rules and judges rely on, the source and the part of it, is checked
here: that part is cut out of the source, and must look like the image. Size, quarter turns, mirroring, grey, contrast,
brightness, inversion, recompression and a few drawn lines do not matter; other content does. A claim without a
rectangle of the source, such as of an image turned by 30 degrees, cannot be checked and counts as unverified.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy
from PIL import Image

from turnwise.sandbox.inside.pixels import grey
from turnwise.sandbox.results import Box, InputImage, Picture, Provenance, Result

GRID = 256
"""Pixels along a side at which the two are compared, or fewer where either has fewer."""
LIKENESS = 0.9
"""The least correlation of brightness. A box that is off by a little passes where the image is smooth there."""
FLAT = 4.0
"""Standard deviation of brightness, of 255, below which a part has nothing to correlate."""
TOLERANCE = 8.0
"""The most that a flat part's brightness may differ on average, of 255."""
SIDES = 1.0
"""Pixels of the source by which the box may differ from the frame it was cut from: boxes are rounded."""
LEAST_SHARE = 0.25
"""Of the image that must be the source: a frame a thousand times its size would make it a dark speck on black."""
MOST_PIXELS = 100_000_000
"""Of a source; a larger one is not decoded."""

Array = numpy.ndarray[tuple[int, int], numpy.dtype[numpy.float32]]


def check_claims(result: Result, given: Sequence[InputImage]) -> Result:
    """The result with each image's provenance verified or not. Decodes the sources: not for the event loop."""
    sources: dict[str, list[Image.Image]] = {}
    for picture in result.images:
        name = picture.provenance.source
        if name is not None and name not in sources:
            decoded = (_decoded(image) for image in given if image.name == name)
            sources[name] = [image for image in decoded if image is not None]
    pictures = []
    for picture in result.images:
        claim = picture.provenance
        holds = claim.source is not None and any(_shows(picture, claim, one) for one in sources[claim.source])
        pictures.append(replace(picture, provenance=replace(claim, verified=holds)))
    return replace(result, images=tuple(pictures))


def _decoded(given: InputImage) -> Image.Image | None:
    """In shades of grey; None for what cannot be read, which no claim about it survives."""
    try:
        if given.mode is not None and given.size is not None:
            return _grey(Image.frombytes(given.mode, given.size, given.data))
        image = Image.open(io.BytesIO(given.data))
        return _grey(image) if image.width * image.height <= MOST_PIXELS else None
    except MemoryError:
        raise
    except Exception:  # PIL's decoders raise anything on a broken file
        return None


def _grey(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = grey(image)
    return image.convert("RGB").convert("L").convert("F")


def _shows(picture: Picture, claim: Provenance, source: Image.Image) -> bool:
    frame = claim.frame or claim.box
    if frame is None or claim.box is None:
        return False
    part = _inside(frame, source.size)
    if part is None or _area(part) < LEAST_SHARE * _area(frame):
        return False
    if max(abs(a - b) for a, b in zip(part, claim.box, strict=True)) > SIDES:
        return False
    shown = _grey(Image.frombytes(picture.mode, picture.size, picture.pixels))
    return any(_alike(turned, source, frame, part) for turned in _turns(shown))


def _inside(frame: Box, size: tuple[int, int]) -> Box | None:
    """What of a frame lies on the source; the rest is black."""
    left, upper = max(frame[0], 0.0), max(frame[1], 0.0)
    right, lower = min(frame[2], float(size[0])), min(frame[3], float(size[1]))
    return (left, upper, right, lower) if left < right and upper < lower else None


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _turns(image: Image.Image) -> Iterator[Image.Image]:
    yield image
    for method in Image.Transpose:
        yield image.transpose(method)


def _alike(shown: Image.Image, source: Image.Image, frame: Box, part: Box) -> bool:
    sides = (frame[2] - frame[0], frame[3] - frame[1])
    grid = (max(1, min(GRID, shown.width, round(sides[0]))), max(1, min(GRID, shown.height, round(sides[1]))))
    scale = (grid[0] / sides[0], grid[1] / sides[1])
    place = [round((part[index] - frame[index % 2]) * scale[index % 2]) for index in range(4)]
    width, height = max(1, place[2] - place[0]), max(1, place[3] - place[1])
    seen = _array(shown.resize(grid, Image.Resampling.BOX))
    for filter_ in (Image.Resampling.BOX, Image.Resampling.NEAREST):  # smooth, or as code may have picked pixels
        expected = Image.new("F", grid)
        expected.paste(source.resize((width, height), filter_, box=part), (place[0], place[1]))
        wanted = _array(expected)
        here = slice(place[1], place[1] + height), slice(place[0], place[0] + width)
        if _same(seen, wanted) and _same(seen[here], wanted[here]):  # the black around it alone proves nothing
            return True
    return False


def _array(image: Image.Image) -> Array:
    return numpy.asarray(image, dtype=numpy.float32)


def _same(seen: Array, expected: Array) -> bool:
    if expected.std() < FLAT:
        return bool(numpy.abs(seen - expected).mean() <= TOLERANCE)
    if seen.std() == 0.0:
        return False
    return bool(abs(numpy.corrcoef(seen.ravel(), expected.ravel())[0, 1]) >= LIKENESS)
