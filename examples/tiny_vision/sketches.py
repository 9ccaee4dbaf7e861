"""Sketches to learn seeing from: canvases full of marks, digits, letters and dots, with what stands in every patch."""

import itertools
import random
from dataclasses import dataclass

import numpy as np
from network import GRID, MERGE, VIEW
from numpy.typing import NDArray
from PIL import Image, ImageOps

from turnwise.ext.tinylook.canvas import Box, Colour, Drawing, NoRoom, Pixels, Sizes
from turnwise.ext.tinylook.font import DIGITS, HEIGHT, LETTERS, WIDTH
from turnwise.ext.tinylook.language import COLOURS, SEARCHED
from turnwise.ext.tinylook.look_grid import STEPS
from turnwise.ext.tinylook.rows import view_of

GLYPHS = ("", *DIGITS, *LETTERS, SEARCHED)
INKS = ("", *COLOURS)
FINE = 2 * GRID
"""Cells of a side for coloured things: half a patch, which is a sixteenth of a view."""
LEGIBLE, VISIBLE = 6.5, 2.0
"""Pixels as shown from which on a glyph is high, or a coloured thing wide, enough to be told."""
SIDES = (2, 2, 4, 4, 4, 4, 8)
"""Sixteenths of the canvas that a look takes in."""
STRETCHED = 0.15


@dataclass(frozen=True, slots=True)
class LabelledImage:
    """An image, and for each of its cells, row by row, what has its middle there."""

    pixels: Pixels
    glyphs: NDArray[np.int64]
    inks: NDArray[np.int64]
    beside: NDArray[np.int64]
    """The digit of a mark, in the cell of the mark."""


class Sketch(Drawing):
    """A drawing that remembers what stands where."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(Sizes(), rng, "train")
        self.glyphs: list[tuple[str, Box]] = []
        self.inks: list[tuple[str, Box, int | None]] = []
        """Each with the number of the glyph that it marks, if any."""
        self._named = ""

    def write(self, character: str, left: int, upper: int, ink: int, scale: int = 1) -> Box:
        """Writes a character as a drawing does, and notes it as a label."""
        box = super().write(character, left, upper, ink, scale)
        self.glyphs.append((character, box))
        return box

    def shade(self, colour: str) -> Colour:
        """As the drawing does; what is filled next has this colour."""
        self._named = colour
        return super().shade(colour)

    def fill(self, box: Box, colour: Colour | int) -> None:
        """Fills a box as a drawing does, and notes its colour as a label."""
        super().fill(box, colour)
        if not isinstance(colour, int):
            self.inks.append((self._named, box, None))

    def marked(self, colour: str | None = None) -> None:
        """A coloured mark with a digit."""
        self.marked_digit(colour or self.rng.choice(COLOURS), self.rng.choice(DIGITS))
        colour, box, _ = self.inks.pop()
        self.inks.append((colour, box, len(self.glyphs) - 1))

    def tile(self) -> None:
        """A letter with a digit behind it, both faint."""
        left, upper = self.place(2 * WIDTH + 3 + WIDTH, 2 * HEIGHT)
        ink = self.ground - self.rng.randint(70, 110)
        self.write(self.rng.choice((SEARCHED, *LETTERS)), left, upper, ink, 2)
        self.write(self.rng.choice(DIGITS), left + 2 * WIDTH + 3, upper + self.rng.randint(0, HEIGHT), ink)

    def dotted(self) -> None:
        """Draws a plate with dots of any colours."""
        left, upper, _, _ = self.plate()
        places = list(itertools.product(range(5), range(5)))
        for column, row in self.rng.sample(places, self.rng.randint(3, 15)):
            x, y = left + 1 + 6 * column + self.rng.randint(0, 1), upper + 1 + 6 * row + self.rng.randint(0, 1)
            self.fill((x, y, x + 4, y + 4), self.shade(self.rng.choice(COLOURS)))

    def table(self) -> None:
        """A plate with two rows of digits."""
        left, upper, _, _ = self.plate()
        for column, row in itertools.product(range(3), range(2)):
            x, y = left + 1 + 10 * column + self.rng.randint(1, 4), upper + 1 + 15 * row + self.rng.randint(1, 7)
            self.write(self.rng.choice(DIGITS), x, y, self.ink())


def sketch(rng: random.Random) -> Sketch:
    """A canvas as crowded as it may become."""
    drawn = Sketch(rng)
    if rng.random() < 0.2:
        drawn.pixels[:] = rng.randint(110, 200)
    for _ in range(rng.randint(4, 50)):
        kind = rng.choices((drawn.marked, drawn.tile, drawn.dotted, drawn.table), (6, 3, 1, 1))[0]
        try:
            kind()
        except NoRoom:
            break
    return drawn


def labelled_view(drawn: Sketch, box: Box, *, stretched: bool = False) -> LabelledImage:
    """A part of the canvas as a look shows it, with its grey levels stretched if asked."""
    left, upper, right, lower = box
    part = Image.fromarray(np.ascontiguousarray(drawn.pixels[upper:lower, left:right]))
    pixels = view_of(np.asarray(ImageOps.autocontrast(part) if stretched else part), VIEW)
    glyphs = np.zeros((GRID, GRID), dtype=np.int64)
    inks, beside = np.zeros((2, FINE, FINE), dtype=np.int64)
    across, down = VIEW / (right - left), VIEW / (lower - upper)
    legible = {}
    for number, (character, (x0, y0, x1, y1)) in enumerate(drawn.glyphs):
        if x0 >= left and y0 >= upper and x1 <= right and y1 <= lower and (y1 - y0) * down > LEGIBLE:
            row, column = (((y0 + y1) / 2 - upper) * down, ((x0 + x1) / 2 - left) * across)
            legible[number] = GLYPHS.index(character)
            glyphs[int(row * GRID / VIEW), int(column * GRID / VIEW)] = legible[number]
    for colour, (x0, y0, x1, y1), marked in drawn.inks:
        middle = (x0 + x1) / 2, (y0 + y1) / 2
        if left <= middle[0] < right and upper <= middle[1] < lower and (x1 - x0) * across > VISIBLE:
            row, column = (middle[1] - upper) * down, (middle[0] - left) * across
            cell = int(row * FINE / VIEW), int(column * FINE / VIEW)
            inks[cell] = INKS.index(colour)
            beside[cell] = 0 if marked is None else legible.get(marked, 0)
    return LabelledImage(pixels, _by_token(glyphs), _by_token(inks), _by_token(beside))


def looks(rng: random.Random, count: int) -> list[LabelledImage]:
    """The whole of a sketch, and parts of it where something stands."""
    drawn = sketch(rng)
    step, canvas = drawn.sizes.step, drawn.sizes.canvas
    views = [labelled_view(drawn, (0, 0, canvas, canvas))]
    things = [glyph[1] for glyph in drawn.glyphs] + [ink[1] for ink in drawn.inks] or [(0, 0, canvas, canvas)]
    while len(views) < count:
        side = rng.choice(SIDES)
        x0, y0, x1, y1 = rng.choice(things)
        left, upper = (_corner(rng, (low + high) // 2 // step, side) for low, high in ((x0, x1), (y0, y1)))
        box = (left * step, upper * step, (left + side) * step, (upper + side) * step)
        views.append(labelled_view(drawn, box, stretched=rng.random() < STRETCHED))
    return views


def caption(rng: random.Random) -> tuple[Pixels, str]:
    """An image with marks of different colours, and where each is: `red 3, 5, 7 blue 12, 8`, with its digit if legible.

    Columns and rows are counted in sixteenths of the image.
    """
    drawn = Sketch(rng)
    for colour in rng.sample(COLOURS, len(COLOURS)):
        drawn.marked(colour)
    step, side = drawn.sizes.step, rng.choice((STEPS, STEPS, 8, 4))
    x0, y0, x1, y1 = rng.choice(drawn.inks)[1]
    left, upper = (_corner(rng, (low + high) // 2 // step, side) * step for low, high in ((x0, x1), (y0, y1)))
    view = labelled_view(drawn, (left, upper, left + side * step, upper + side * step))
    inks, beside = (_by_row(cells) for cells in (view.inks, view.beside))
    marks = []
    for row, column in np.argwhere(inks > 0):
        digit = GLYPHS[beside[row, column]]
        marks.append(f"{INKS[inks[row, column]]} {column}, {row}" + (f", {digit}" if digit else ""))
    rng.shuffle(marks)
    return view.pixels, " ".join(marks)


def _corner(rng: random.Random, around: int, side: int) -> int:
    return min(max(around - rng.randrange(side), 0), STEPS - side)


def _by_token(cells: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cells, [side, side], as [tokens, cells of a token]."""
    tokens = GRID // MERGE
    each = len(cells) // tokens
    return cells.reshape(tokens, each, tokens, each).transpose(0, 2, 1, 3).reshape(tokens * tokens, each * each)


def _by_row(cells: NDArray[np.int64]) -> NDArray[np.int64]:
    """The cells, which stand token by token, as a grid of rows and columns of the image."""
    tokens = GRID // MERGE
    each = int(cells.shape[1] ** 0.5)
    return cells.reshape(tokens, tokens, each, each).transpose(0, 2, 1, 3).reshape(tokens * each, tokens * each)
