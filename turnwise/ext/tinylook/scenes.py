"""The scenes of `tinylook`: for each kind of question a canvas, the answer, and the boxes that hold the evidence."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from turnwise.ext.tinylook.canvas import Box, Drawing, NoRoom, Pixels, Sizes, split_of
from turnwise.ext.tinylook.font import DIGITS, HEIGHT, LETTERS, WIDTH
from turnwise.ext.tinylook.language import COLOURS, ROWS, SEARCHED, SHAPES, SIDES, SUMS, Puzzle, read_question

PRIOR_DIGIT, PRIOR_SHARE = "7", 0.7
"""What `prior` answers so often."""
DOTS, CELL = (4, 5), 6
"""Pixels of dots, and of the place of each on a plate."""
TILES = 8, 16
SPECKS = 24
"""The most that lie around a tile's digit."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """What is drawn: `Knobs(weights={Puzzle.READ: 2, Puzzle.NONE: 1})` draws those two only."""

    sizes: Sizes = field(default_factory=Sizes)
    weights: Mapping[Puzzle, float] = field(default_factory=lambda: dict.fromkeys(Puzzle, 1.0) | {Puzzle.NONE: 2.0})
    """A fifth needs no look by default: one that always looks must not do well by that."""

    def __post_init__(self) -> None:
        weights = self.weights.values()
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights) > 0:
            listing = ", ".join(f"{puzzle}={weight:g}" for puzzle, weight in self.weights.items())
            raise ValueError(f"weights are numbers from 0 on, one of them above it, not {listing}")


@dataclass(frozen=True, slots=True)
class Scene:
    """One canvas with its question; `targets` are boxes in its pixels, each holding evidence."""

    puzzle: Puzzle
    question: str
    answer: str
    targets: tuple[Box, ...]
    pixels: Pixels
    regions: tuple[Box, ...] = ()
    """Where somebody who knows would look: a mark with its digit, a tile, a plate."""
    turned: int = 0
    """Degrees clockwise by which the canvas was turned after it was drawn."""


def scene_at(split: str, seed: int, index: int, knobs: Knobs | None = None) -> Scene:
    """Scene number `index` of a split. Train and test share no place of a target, whatever the seed."""
    knobs = knobs or Knobs()
    rng = random.Random(f"tinylook/{seed}/{split}/{index}")
    puzzle = rng.choices(list(knobs.weights), list(knobs.weights.values()))[0]
    return draw(puzzle, split, rng, knobs.sizes)


def draw(puzzle: Puzzle, split: str, rng: random.Random, sizes: Sizes) -> Scene:
    """A scene of this kind; one that became too crowded is begun anew."""
    while True:
        try:
            return _SCENES[puzzle](Drawing(sizes, rng, split))
        except NoRoom:
            continue


def _read(drawing: Drawing, puzzle: Puzzle = Puzzle.READ) -> Scene:
    rng = drawing.rng
    colours = rng.sample(COLOURS, 3)
    digits = [rng.choice(DIGITS) for _ in colours]
    if puzzle is Puzzle.PRIOR:
        digits[0] = PRIOR_DIGIT if rng.random() < PRIOR_SHARE else rng.choice(DIGITS.replace(PRIOR_DIGIT, ""))
    target = drawing.marked_digit(colours[0], digits[0])
    region = drawing.taken[-1]
    for colour, digit in zip(colours[1:], digits[1:], strict=True):
        drawing.marked_digit(colour, digit, is_target=False)
    return Scene(puzzle, read_question(puzzle, colour=colours[0]), digits[0], (target,), drawing.pixels, (region,))


def _search(drawing: Drawing) -> Scene:
    rng, sizes = drawing.rng, drawing.sizes
    scale = max(1, round(sizes.canvas / sizes.view / 2))
    side = sizes.canvas // 4
    width, height = WIDTH * scale + 3 + WIDTH, HEIGHT * scale
    cells = rng.sample(list(itertools.product(range(4), range(4))), rng.randint(*TILES))
    answer, target, tile = rng.choice(DIGITS), (0, 0, 0, 0), (0, 0, 0, 0)
    for number, (column, row) in enumerate(cells):
        letter, digit = (SEARCHED, answer) if number == 0 else (rng.choice(LETTERS), rng.choice(DIGITS))
        while True:
            left = column * side + rng.randint(2, side - width - 2)
            upper = row * side + rng.randint(2, side - height - 2)
            at = left + WIDTH * scale + 3, upper + rng.randint(0, height - HEIGHT)
            if number or split_of(*at) == drawing.split:
                break
        drawing.write(letter, left, upper, drawing.ground - rng.randint(60, 140), scale)
        box = drawing.write(digit, *at, drawing.ground - rng.randint(40, 140))
        drawing.soil(box, rng.randint(0, SPECKS))
        if number == 0:
            target, tile = box, (left, upper, left + width, upper + height)
    return Scene(Puzzle.SEARCH, read_question(Puzzle.SEARCH), answer, (target,), drawing.pixels, (tile,))


def _count(drawing: Drawing) -> Scene:
    rng = drawing.rng
    colour, *others = rng.sample(COLOURS, 3)
    plate = drawing.plate()
    per_row = (drawing.sizes.plate - 2) // CELL
    count = rng.randint(1, 9)
    cells = rng.sample(list(itertools.product(range(per_row), range(per_row))), count + rng.randint(2, 6))
    targets = []
    for number, (column, row) in enumerate(cells):
        size = rng.choice(DOTS)
        left = plate[0] + 1 + column * CELL + rng.randint(0, CELL - size - 1)
        upper = plate[1] + 1 + row * CELL + rng.randint(0, CELL - size - 1)
        box = (left, upper, left + size, upper + size)
        drawing.fill(box, drawing.tint(colour if number < count else rng.choice(others)))
        targets += [box] if number < count else []
    question = read_question(Puzzle.COUNT, colour=colour)
    return Scene(Puzzle.COUNT, question, str(count), tuple(targets), drawing.pixels, (plate,))


def _compare(drawing: Drawing) -> Scene:
    rng, canvas = drawing.rng, drawing.sizes.canvas
    colour, other = rng.sample(COLOURS, 2)
    answer = rng.choice(SIDES)
    low, high = sorted(rng.sample(DIGITS, 2))
    edge, middle = drawing.sizes.step, canvas // 2
    halves = (edge, edge, middle - edge, canvas - edge), (middle + edge, edge, canvas - edge, canvas - edge)
    digits = (high, low) if answer == SIDES[0] else (low, high)
    targets = [drawing.marked_digit(colour, digit, within=half) for digit, half in zip(digits, halves, strict=True)]
    regions = tuple(drawing.taken[-2:])
    drawing.marked_digit(other, rng.choice(DIGITS), is_target=False)
    question = read_question(Puzzle.COMPARE, colour=colour)
    return Scene(Puzzle.COMPARE, question, answer, tuple(targets), drawing.pixels, regions)


def _rotate(drawing: Drawing) -> Scene:
    rng, sizes = drawing.rng, drawing.sizes
    quarters = rng.randint(1, 3)
    colour, other = rng.sample(COLOURS, 2)
    answer = rng.choice(DIGITS)
    drawing.fill((0, 0, sizes.canvas, 2 * sizes.canvas // sizes.view), 30)  # the upper edge
    bare, boxes = drawing.pixels.copy(), list(drawing.taken)
    while True:  # the split is that of the place on the canvas as it is shown
        drawing.pixels, drawing.taken = bare.copy(), list(boxes)
        upright = drawing.marked_digit(colour, answer, is_target=False)
        target = turned(upright, quarters, sizes.canvas)
        if split_of(target[0], target[1]) == drawing.split:
            break
    region = turned(drawing.taken[-1], quarters, sizes.canvas)
    drawing.marked_digit(other, rng.choice(DIGITS), is_target=False)
    pixels = np.ascontiguousarray(np.rot90(drawing.pixels, -quarters))
    question = read_question(Puzzle.ROTATE, colour=colour)
    return Scene(Puzzle.ROTATE, question, answer, (target,), pixels, (region,), 90 * quarters)


def turned(box: Box, quarters: int, side: int) -> Box:
    """A box after so many quarter turns clockwise of its canvas."""
    for _ in range(quarters):
        box = side - box[3], box[0], side - box[1], box[2]
    return box


def _contrast(drawing: Drawing) -> Scene:
    """Marks on both sides of a cell that a look at whole sixteenths shows without them."""
    rng, sizes = drawing.rng, drawing.sizes
    step, mark, cell = sizes.step, sizes.mark, sizes.plate
    colour, other = rng.sample(COLOURS, 2)
    answer = rng.choice(DIGITS)
    drawing.pixels[:] = rng.randint(110, 200)
    room = -(-mark // step) * step
    while True:
        left, upper = drawing.place(room + cell + room, cell, every=step)
        at = left + room + rng.randint(2, cell - WIDTH - 2), upper + rng.randint(2, cell - HEIGHT - 2)
        if split_of(*at) == drawing.split:
            break
        drawing.taken.pop()
    middle = upper + (cell - mark) // 2
    for edge in (left + room - mark, left + room + cell):
        drawing.fill((edge, middle, edge + mark, middle + mark), drawing.shade(colour))
    target = drawing.write(answer, *at, drawing.ground - rng.randint(4, 8))
    drawing.marked_digit(other, rng.choice(DIGITS), is_target=False)
    question = read_question(Puzzle.CONTRAST, colour=colour)
    region = (left + room, upper, left + room + cell, upper + cell)
    return Scene(Puzzle.CONTRAST, question, answer, (target,), drawing.pixels, (region,))


def _compute(drawing: Drawing) -> Scene:
    rng = drawing.rng
    operation, row = rng.choice(SUMS), rng.randrange(len(ROWS))
    answer = rng.randint(0, 27 if operation == "sum" else 9)
    numbers = [[rng.randint(0, 9) for _ in range(3)] for _ in ROWS]
    numbers[row] = list(rng.choice(_triples(operation)[answer]))
    plate = drawing.plate()
    across, down = (drawing.sizes.plate - 2) // 3, (drawing.sizes.plate - 2) // 2
    targets = []
    for down_number, line in enumerate(numbers):
        for column, number in enumerate(line):
            left = plate[0] + 1 + column * across + rng.randint(1, across - WIDTH - 1)
            upper = plate[1] + 1 + down_number * down + rng.randint(1, down - HEIGHT - 1)
            box = drawing.write(str(number), left, upper, drawing.ink())
            targets += [box] if down_number == row else []
    question = read_question(Puzzle.COMPUTE, row=f"{operation} {ROWS[row]}")
    return Scene(Puzzle.COMPUTE, question, str(answer), tuple(targets), drawing.pixels, (plate,))


@functools.cache
def _triples(operation: str) -> dict[int, list[Sequence[int]]]:
    """Rows of three digits by their sum or their largest, so that every answer is as likely."""
    measure: Callable[[Sequence[int]], int] = sum if operation == "sum" else max
    rows: dict[int, list[Sequence[int]]] = {}
    for triple in itertools.product(range(10), repeat=3):
        rows.setdefault(measure(triple), []).append(triple)
    return rows


def _none(drawing: Drawing) -> Scene:
    rng, canvas = drawing.rng, drawing.sizes.canvas
    colour, shape = rng.choice(COLOURS), rng.choice(SHAPES)
    side = rng.randint(canvas // 3, canvas // 2)
    while True:
        left, upper = drawing.place(side, side)
        if split_of(left, upper) == drawing.split:
            break
        drawing.taken.pop()
    down, across = np.mgrid[0:side, 0:side] * 2.0 / (side - 1) - 1.0
    inside = {
        "square": np.full((side, side), True),
        "circle": across**2 + down**2 <= 1.0,
        "triangle": np.abs(across) <= (down + 1.0) / 2.0,
    }[shape]
    drawing.pixels[upper : upper + side, left : left + side][inside] = drawing.shade(colour)
    return Scene(Puzzle.NONE, read_question(Puzzle.NONE, shape=shape), colour, (), drawing.pixels)


_SCENES: dict[Puzzle, Callable[[Drawing], Scene]] = {
    Puzzle.READ: _read,
    Puzzle.SEARCH: _search,
    Puzzle.COUNT: _count,
    Puzzle.COMPARE: _compare,
    Puzzle.ROTATE: _rotate,
    Puzzle.CONTRAST: _contrast,
    Puzzle.COMPUTE: _compute,
    Puzzle.NONE: _none,
    Puzzle.PRIOR: lambda drawing: _read(drawing, Puzzle.PRIOR),
}
