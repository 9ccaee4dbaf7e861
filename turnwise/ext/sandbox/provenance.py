"""Whether an image shows what its session says it shows: the claim is compared with the source's pixels, on the host.

A session's word on its images is its own. What rules and judges rely on, the source and the part of it, is checked
here: that part is cut out of the source, and must look like the image. Size, quarter turns, mirroring, grey, contrast,
brightness, inversion, recompression and a few drawn lines do not matter; other content contradicts the claim. What
nobody can tell is unverified: a claim without a rectangle of the source, such as of an image turned by 30 degrees, or
one about a part so even that recompression leaves nothing of it.
"""

import enum
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy
from PIL import Image

from turnwise.data.images.provenance import Matrix, OriginCheck, composed, scaled, turned
from turnwise.ext.sandbox.inside.pixels import grey
from turnwise.ext.sandbox.results import Box, InputImage, Picture, Provenance, Result

GRID = 256
"""Pixels along a side at which the two are compared, or fewer where either has fewer."""
LIKENESS = 0.9
"""The least correlation of brightness. A box that is off by a little passes where the image is smooth there."""
EVEN = 0.01
"""Standard deviation of brightness, of 255, below which a part has nothing to correlate."""
FLAT = 4.0
"""The same, below which a part may be lost in recompression: then a difference proves nothing."""
TOLERANCE = 8.0
"""The most that a flat part's brightness may differ on average, of 255."""
SIDES = 1.0
"""Pixels of the source by which the box may differ from the frame it was cut from: boxes are rounded."""
LEAST_SHARE = 0.25
"""Of the image that must be the source: a frame a thousand times its size would make it a dark speck on black."""
MOST_PIXELS = 100_000_000
"""Of a source; a larger one is not decoded."""

Array = numpy.ndarray[tuple[int, int], numpy.dtype[numpy.float64]]


class _Likeness(enum.Enum):
    SAME = "same"
    UNCLEAR = "unclear"
    OTHER = "other"


def check_claims(result: Result, inputs: Sequence[InputImage]) -> Result:
    """The result with what came of each image's claim. Decodes the sources: not for the event loop."""
    sources: dict[str, list[Image.Image | None]] = {}
    for picture in result.images:
        name = picture.provenance.source
        if name is not None and name not in sources:
            sources[name] = [_decoded(image) for image in inputs if image.name == name]
    checked = (
        replace(
            shown_picture, provenance=_checked(shown_picture, sources.get(shown_picture.provenance.source or "", []))
        )
        for shown_picture in result.images
    )
    return replace(result, images=tuple(checked))


def _checked(picture: Picture, sources: Sequence[Image.Image | None]) -> Provenance:
    """The claim with the host's finding; of several sources of one name any may bear it out."""
    claim = picture.provenance
    if claim.source is None:
        return replace(claim, origin=OriginCheck.UNVERIFIED)
    verdict = OriginCheck.CONTRADICTED  # of an image that nobody gave
    for source in sources:
        if source is None:
            verdict = OriginCheck.UNVERIFIED
            continue
        origin, matrix = _compared(picture, claim, source)
        if origin is OriginCheck.VERIFIED:
            return replace(claim, origin=origin, matrix=matrix, source_size=source.size)
        verdict = origin if origin is OriginCheck.UNVERIFIED else verdict
    return replace(claim, origin=verdict)


def _decoded(source: InputImage) -> Image.Image | None:
    """In shades of grey; None for what cannot be read, which no claim about it survives."""
    try:
        if source.mode is not None and source.size is not None:
            return _grey(Image.frombytes(source.mode, source.size, source.data))
        image = Image.open(io.BytesIO(source.data))
        return _grey(image) if image.width * image.height <= MOST_PIXELS else None
    except MemoryError:
        raise
    except Exception:  # PIL's decoders raise anything on a broken file
        return None


def _grey(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = grey(image)
    return image.convert("RGB").convert("L").convert("F")


def _compared(picture: Picture, claim: Provenance, source: Image.Image) -> tuple[OriginCheck, Matrix | None]:
    """What the pixels say, and for a claim that they bear out how they lie in the source."""
    frame = claim.frame or claim.box
    if frame is None or claim.box is None:
        return OriginCheck.UNVERIFIED, None
    part = _inside(frame, source.size)
    if part is None or _area(part) < LEAST_SHARE * _area(frame):
        return OriginCheck.CONTRADICTED, None
    if max(abs(a - b) for a, b in zip(part, claim.box, strict=True)) > SIDES:
        return OriginCheck.CONTRADICTED, None
    grey = _grey(Image.frombytes(picture.mode, picture.size, picture.pixels))
    origin = OriginCheck.CONTRADICTED
    for upright, back in _turns(grey):
        likeness = _alike(upright, source, frame, part)
        if likeness is _Likeness.SAME:
            return OriginCheck.VERIFIED, composed(scaled(frame, upright.size), back)
        if likeness is _Likeness.UNCLEAR:
            origin = OriginCheck.UNVERIFIED
    return origin, None


def _inside(frame: Box, size: tuple[int, int]) -> Box | None:
    """What of a frame lies on the source; the rest is black."""
    left, upper = max(frame[0], 0.0), max(frame[1], 0.0)
    right, lower = min(frame[2], float(size[0])), min(frame[3], float(size[1]))
    return (left, upper, right, lower) if left < right and upper < lower else None


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _turns(image: Image.Image) -> Iterator[tuple[Image.Image, Matrix | None]]:
    """(the image turned or mirrored, how the pixels of the image itself lie in that)."""
    yield image, (1, 0, 0, 0, 1, 0)
    backwards = {Image.Transpose.ROTATE_90: Image.Transpose.ROTATE_270}
    backwards |= {back: method for method, back in backwards.items()}
    for method in Image.Transpose:
        upright = image.transpose(method)
        yield upright, turned(int(backwards.get(method, method)), upright.size)


def _alike(picture: Image.Image, source: Image.Image, frame: Box, part: Box) -> _Likeness:
    sides = (frame[2] - frame[0], frame[3] - frame[1])
    grid = (max(1, min(GRID, picture.width, round(sides[0]))), max(1, min(GRID, picture.height, round(sides[1]))))
    scale = (grid[0] / sides[0], grid[1] / sides[1])
    corners = [round((part[index] - frame[index % 2]) * scale[index % 2]) for index in range(4)]
    width, height = max(1, corners[2] - corners[0]), max(1, corners[3] - corners[1])
    actual = _array(picture.resize(grid, Image.Resampling.BOX))
    best = _Likeness.OTHER
    for filter_ in (Image.Resampling.BOX, Image.Resampling.NEAREST):  # smooth, or as code may have picked pixels
        expected = Image.new("F", grid)
        expected.paste(source.resize((width, height), filter_, box=part), (corners[0], corners[1]))
        wanted = _array(expected)
        here = slice(corners[1], corners[1] + height), slice(corners[0], corners[0] + width)
        likenesses = {
            _likeness(actual, wanted),
            _likeness(actual[here], wanted[here]),
        }  # the black around it proves nothing
        if likenesses == {_Likeness.SAME}:
            return _Likeness.SAME
        if _Likeness.OTHER not in likenesses:
            best = _Likeness.UNCLEAR
    return best


def _array(image: Image.Image) -> Array:
    return numpy.asarray(image, dtype=numpy.float64)


def _likeness(actual: Array, expected: Array) -> _Likeness:
    close = bool(numpy.abs(actual - expected).mean() <= TOLERANCE)
    if expected.std() < EVEN:
        return _Likeness.SAME if close and actual.std() < FLAT else _Likeness.OTHER
    if actual.std() > 0.0 and abs(numpy.corrcoef(actual.ravel(), expected.ravel())[0, 1]) >= LIKENESS:
        return _Likeness.SAME
    return _Likeness.UNCLEAR if close and expected.std() < FLAT else _Likeness.OTHER
