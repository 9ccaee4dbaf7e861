"""A canvas to draw on: marks, digits, dots and plates that never overlap, at places that belong to one split."""

import functools
import hashlib
import random
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from turnwise.ext.tinylook.font import HEIGHT, WIDTH, glyph
from turnwise.ext.tinylook.language import CANVAS
from turnwise.ext.tinylook.look_grid import STEPS, VIEW

Box = tuple[int, int, int, int]
Pixels = NDArray[np.uint8]
Colour = tuple[int, int, int]
RGB: dict[str, Colour] = {
    "red": (222, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 222),
    "yellow": (226, 200, 36), "purple": (150, 56, 190), "orange": (242, 140, 24),
}  # fmt: skip
MOST_TRIES = 400
PALE = 250
"""The grey of a plate."""
GAP = 3
"""Pixels between a mark and its digit."""


class NoRoom(Exception):
    """This drawing became too crowded; another is begun."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pixels of the canvas and of the view: `Sizes(256, 64)`."""

    canvas: int = CANVAS
    view: int = VIEW

    def __post_init__(self) -> None:
        if self.view % 8 or not 64 <= self.view <= 256:
            raise ValueError(f"the view has a side of 64 to 256 pixels, a multiple of 8, not {self.view}")
        if self.canvas not in (2 * self.view, 4 * self.view, 8 * self.view):
            raise ValueError(
                f"the canvas has two, four or eight times the side of the view ({self.view}), not {self.canvas}"
            )

    @property
    def step(self) -> int:
        """The pixels of a sixteenth of the canvas."""
        return self.canvas // STEPS

    @property
    def mark(self) -> int:
        """Side of a mark: to be seen in the view, and to be looked at together with its digit."""
        return min(16, 4 * self.canvas // self.view)

    @property
    def plate(self) -> int:
        """Side of a plate, which a look shows alone."""
        return self.view // 2


@functools.lru_cache(maxsize=1 << 17)
def split_of(left: int, upper: int) -> str:
    """A fifth of all places is held out, decided by their hash."""
    digest = hashlib.blake2b(f"{left},{upper}".encode(), digest_size=4).digest()
    return "test" if digest[0] % 5 == 0 else "train"


@dataclass(slots=True)
class Drawing:
    """A canvas in the making; `split` is the one whose places targets may take."""

    sizes: Sizes
    rng: random.Random
    split: str
    pixels: Pixels = field(init=False)
    taken: list[Box] = field(default_factory=list)

    def __post_init__(self) -> None:
        level = self.rng.randint(226, 246)
        self.pixels = np.full((self.sizes.canvas, self.sizes.canvas, 3), level, dtype=np.uint8)

    @property
    def ground(self) -> int:
        """The grey level of the background."""
        return int(self.pixels[0, 0, 0])

    def fill(self, box: Box, colour: Colour | int) -> None:
        """Draws a filled rectangle of one colour."""
        self.pixels[box[1] : box[3], box[0] : box[2]] = colour

    def write(self, character: str, left: int, upper: int, ink: int, scale: int = 1) -> Box:
        """A glyph in grey; where it stands."""
        shape = glyph(character, scale)
        height, width = shape.shape
        self.pixels[upper : upper + height, left : left + width][shape] = ink
        return left, upper, left + width, upper + height

    def ink(self) -> int:
        """Dark, but never the same: how dark a spot of the view is must not tell the digit."""
        return self.rng.randint(0, 130)

    def shade(self, colour: str) -> Colour:
        """A colour by name, a little different each time."""
        red, green, blue = (min(255, max(0, level + self.rng.randint(-12, 12))) for level in RGB[colour])
        return red, green, blue

    def tint(self, colour: str) -> Colour:
        """A colour by name, paler or stronger: how much of it there is must not tell how many things have it."""
        share = self.rng.uniform(0.3, 1.0)
        red, green, blue = (round(PALE + (level - PALE) * share) for level in RGB[colour])
        return red, green, blue

    def soil(self, box: Box, count: int) -> None:
        """Specks of one pixel around a digit and none in it: in the view they weigh as much as its ink."""
        for _ in range(count):
            left, upper = (self.rng.randint(max(0, box[axis] - 5), box[axis + 2] + 4) for axis in (0, 1))
            near = box[0] - 1 <= left <= box[2] and box[1] - 1 <= upper <= box[3]
            if not near and max(left, upper) < self.sizes.canvas:
                self.fill((left, upper, left + 1, upper + 1), self.ground - self.rng.randint(40, 140))

    def is_free(self, box: Box) -> bool:
        """Whether nothing stands there."""
        return not any(
            box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in self.taken
        )

    def place(self, width: int, height: int, *, within: Box | None = None, every: int = 1) -> tuple[int, int]:
        """A free corner for a rectangle, on a multiple of `every`; it is taken from now on. NoRoom when there is none.

        One step of the border stays free.
        """
        step, canvas = self.sizes.step, self.sizes.canvas
        area = within or (step, step, canvas - step, canvas - step)
        for _ in range(MOST_TRIES):
            left = _multiple(self.rng, area[0], area[2] - width, every)
            upper = _multiple(self.rng, area[1], area[3] - height, every)
            box = (left - 2, upper - 2, left + width + 2, upper + height + 2)
            if self.is_free(box):
                self.taken.append(box)
                return left, upper
        raise NoRoom

    def marked_digit(self, colour: str, digit: str, *, is_target: bool = True, within: Box | None = None) -> Box:
        """A coloured square with a digit on one of its sides; where the digit stands."""
        mark, rng = self.sizes.mark, self.rng
        side = rng.randrange(4)
        across, down = (mark + GAP + WIDTH, mark) if side % 2 else (mark, mark + GAP + HEIGHT)
        for _ in range(MOST_TRIES):
            left, upper = self.place(across, down, within=within)
            moved = rng.randint(0, mark - HEIGHT) if side % 2 else rng.randint(0, mark - WIDTH)
            square, at = _beside(side, left, upper, mark, moved)
            if not is_target or split_of(*at) == self.split:
                self.fill((*square, square[0] + mark, square[1] + mark), self.shade(colour))
                return self.write(digit, *at, self.ink())
            self.taken.pop()
        raise NoRoom

    def plate(self) -> Box:
        """A pale square with a dark edge that a look at whole sixteenths shows alone, at a place of the split."""
        side, step = self.sizes.plate, self.sizes.step
        for _ in range(MOST_TRIES):
            left, upper = self.place(side, side, every=step)
            if split_of(left, upper) == self.split:
                box = (left, upper, left + side, upper + side)
                self.fill(box, self.ground - 40)
                self.fill((left + 1, upper + 1, left + side - 1, upper + side - 1), PALE)
                return box
            self.taken.pop()
        raise NoRoom


def _multiple(rng: random.Random, low: int, high: int, every: int) -> int:
    first, last = -(-low // every), high // every
    if last < first:
        raise NoRoom
    return rng.randint(first, last) * every


def _beside(side: int, left: int, upper: int, mark: int, moved: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(corner of the mark, corner of the digit): 0 below it, 1 on its right, 2 above it, 3 on its left."""
    match side:
        case 0:
            return (left, upper), (left + moved, upper + mark + GAP)
        case 1:
            return (left, upper), (left + mark + GAP, upper + moved)
        case 2:
            return (left, upper + HEIGHT + GAP), (left + moved, upper)
        case _:
            return (left + WIDTH + GAP, upper), (left, upper + moved)
