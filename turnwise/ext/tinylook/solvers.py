"""Solvers of `tinylook` that need no model: one that knows where to look, and one that looks anywhere.

Both take the answer from the pixels of what they were shown, never from the ground truth: with nothing to be read in
them they can only guess.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.ext.tinylook.canvas import PALE, RGB, Box, Pixels, Sizes
from turnwise.ext.tinylook.font import DIGITS, HEIGHT, WIDTH, glyph
from turnwise.ext.tinylook.language import COLOURS, SIDES, Puzzle
from turnwise.ext.tinylook.look import box_of, crop_view
from turnwise.ext.tinylook.look_grid import STEPS
from turnwise.ext.tinylook.scenes import Scene, turned

QUADRANTS = ((0, 0), (8, 0), (0, 8), (8, 8))
FAINT = 12.0
"""Grey levels: a region that varies less holds nothing that can be read."""
CERTAIN = 0.75
"""Likeness to a digit from which on it is taken for one."""


@dataclass(frozen=True, slots=True)
class Glance:
    """One call of `look`: `Glance((3, 5, 7, 9), turn=90)`."""

    box: Box
    turn: int | None = None
    contrast: bool = False

    def at(self, pixels: Pixels, view: int) -> Pixels:
        """What the tool shows of a canvas."""
        from PIL import Image

        picture = Image.fromarray(pixels)
        image = crop_view(picture, box_of(self.box, picture.size), self.turn, self.contrast, view)
        return np.asarray(image)


def oracle_glances(scene: Scene, sizes: Sizes) -> list[Glance]:
    """The looks of somebody who knows the scene: as few as it takes, and each as near as it must be."""
    turn = 360 - scene.turned if scene.turned else None
    match scene.puzzle:
        case Puzzle.NONE:
            return []
        case Puzzle.COUNT | Puzzle.COMPUTE | Puzzle.CONTRAST:
            boxes = [covering(region, sizes) for region in scene.regions]
        case Puzzle.SEARCH:
            boxes = [*_quadrants_until(scene.regions[0], sizes), around(scene.regions[0], sizes)]
        case _:
            boxes = [around(region, sizes) for region in scene.regions]
    return [Glance(box, turn, scene.puzzle is Puzzle.CONTRAST) for box in boxes]


def around(region: Box, sizes: Sizes) -> Box:
    """The box in sixteenths that a look shows without enlarging it, with the region in its middle."""
    side = max(1, sizes.view // sizes.step)
    left, upper = (
        min(max(round((region[axis] + region[axis + 2]) / 2 / sizes.step - side / 2), 0), STEPS - side)
        for axis in (0, 1)
    )
    return left, upper, left + side, upper + side


def covering(region: Box, sizes: Sizes) -> Box:
    """The smallest box in sixteenths that holds the region."""
    left, upper = region[0] // sizes.step, region[1] // sizes.step
    return left, upper, -(-region[2] // sizes.step), -(-region[3] // sizes.step)


def random_glance(rng: random.Random, sizes: Sizes) -> Glance:
    """A look anywhere, at the distance from which digits can be read."""
    side = max(1, sizes.view // sizes.step)
    left, upper = rng.randint(0, STEPS - side), rng.randint(0, STEPS - side)
    return Glance((left, upper, left + side, upper + side))


def _quadrants_until(region: Box, sizes: Sizes) -> list[Box]:
    middle = [(region[axis] + region[axis + 2]) / 2 / sizes.step for axis in (0, 1)]
    boxes: list[Box] = []
    for left, upper in QUADRANTS:
        boxes.append((left, upper, left + 8, upper + 8))
        if left <= middle[0] < left + 8 and upper <= middle[1] < upper + 8:
            break
    return boxes


# --- reading ------------------------------------------------------------------------------------------------------


def answer_from(scene: Scene, view: Pixels, glances: Sequence[Glance], images: Sequence[Pixels], sizes: Sizes) -> str:
    """The answer that can be read in what the looks showed; "" when that is not enough. The scene says what is asked
    and where its evidence lies on the canvas; what stands there comes from `images`."""
    views = _GlanceReader(glances, images, sizes)
    match scene.puzzle:
        case Puzzle.NONE:
            return colour_in(view)
        case Puzzle.COUNT:
            return views.dots(scene.regions[0], scene.question.rpartition(" ")[2])
    digits = [views.digit(target) for target in scene.targets]
    if "" in digits:
        return ""
    match scene.puzzle:
        case Puzzle.COMPARE:
            return "" if digits[0] == digits[1] else SIDES[0] if digits[0] > digits[1] else SIDES[1]
        case Puzzle.COMPUTE:
            numbers = [int(digit) for digit in digits]
            return str(sum(numbers) if scene.question.startswith("sum") else max(numbers))
        case _:
            return digits[0]


def guess(scene: Scene, rng: random.Random) -> str:
    """Any answer that the question allows."""
    match scene.puzzle:
        case Puzzle.NONE:
            return rng.choice(COLOURS)
        case Puzzle.COUNT:
            return str(rng.randint(1, 9))
        case Puzzle.COMPARE:
            return rng.choice(SIDES)
        case Puzzle.COMPUTE if scene.question.startswith("sum"):
            return str(rng.randint(0, 27))
        case _:
            return rng.choice(DIGITS)


def colour_in(view: Pixels) -> str:
    """The colour of the largest coloured thing in a view; "" for one without colours."""
    flat = view.reshape(-1, 3).astype(np.float32)
    coloured = flat[flat.max(1) - flat.min(1) > 80]
    if not len(coloured):
        return ""
    nearest = np.argmin(_distances(coloured), axis=1)
    return COLOURS[int(np.bincount(nearest, minlength=len(COLOURS)).argmax())]


def read_digit(region: Pixels) -> str:
    """The digit that fills this region; "" when it looks like none."""
    from PIL import Image

    grey = region.astype(np.float32).mean(2)
    if grey.size == 0 or grey.max() - grey.min() < FAINT:
        return ""
    small = np.asarray(Image.fromarray(grey).resize((WIDTH, HEIGHT), Image.Resampling.BOX))
    likeness = [_correlation(-small, glyph(digit).astype(np.float32)) for digit in DIGITS]
    best = int(np.argmax(likeness))
    return DIGITS[best] if likeness[best] >= CERTAIN else ""


def _correlation(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    left, right = left - left.mean(), right - right.mean()
    size = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float((left * right).sum()) / size if size else 0.0


def _distances(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    palette = np.array([RGB[colour] for colour in COLOURS], dtype=np.float32)
    distances: NDArray[np.float32] = np.linalg.norm(pixels[:, None] - palette[None], axis=2)
    return distances


def _tinted(region: Pixels, colour: str) -> NDArray[np.bool_]:
    """Where a plate has this colour, however pale: as far from its grey in the same direction."""
    away = PALE - region.astype(np.float32)
    palette = PALE - np.array([RGB[name] for name in COLOURS], dtype=np.float32)
    size = np.linalg.norm(away, axis=2)
    alike = away @ (palette / np.linalg.norm(palette, axis=1, keepdims=True)).T
    is_own = alike.argmax(2) == COLOURS.index(colour)
    mask: NDArray[np.bool_] = (size > 40) & (alike.max(2) > 0.985 * size) & is_own
    return mask


def _islands(mask: NDArray[np.bool_]) -> int:
    """How many connected parts it has that are larger than a frayed edge."""
    left = {(int(y), int(x)) for y, x in np.argwhere(mask)}
    count = 0
    while left:
        waiting, size = [left.pop()], 0
        while waiting:
            y, x = waiting.pop()
            size += 1
            near = left & {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)}
            left -= near
            waiting += near
        count += size >= 6
    return count


@dataclass(frozen=True, slots=True)
class _GlanceReader:
    """What looks showed, to be asked by places on the canvas."""

    glances: Sequence[Glance]
    shown: Sequence[Pixels]
    sizes: Sizes

    def digit(self, target: Box) -> str:
        return self._first(target, read_digit)

    def dots(self, plate: Box, colour: str) -> str:
        def count(region: Pixels) -> str:
            return str(_islands(_tinted(region, colour)) or "")

        return self._first(plate, count)

    def _first(self, target: Box, read: Callable[[Pixels], str]) -> str:
        """What the nearest look that shows all of a place says of it."""
        order = sorted(
            range(len(self.glances)), key=lambda index: self.glances[index].box[2] - self.glances[index].box[0]
        )
        for number in order:
            box = self._place(target, self.glances[number])
            if box is not None:
                region = self.shown[number][box[1] : box[3], box[0] : box[2]]
                return read(region)
        return ""

    def _place(self, target: Box, glance: Glance) -> Box | None:
        """Where a place of the canvas lies in what a look showed; None when not all of it does. Looks are square."""
        step, view = self.sizes.step, self.sizes.view
        left, upper, right, lower = (side * step for side in glance.box)
        inside = left <= target[0] and upper <= target[1] and target[2] <= right and target[3] <= lower
        if not inside or right - left != lower - upper:
            return None
        side = right - left
        near = target[0] - left, target[1] - upper, target[2] - left, target[3] - upper
        near = turned(near, (glance.turn or 0) // 90, side)
        scaled = [round(edge * view / side) for edge in near]
        return scaled[0], scaled[1], scaled[2], scaled[3]
