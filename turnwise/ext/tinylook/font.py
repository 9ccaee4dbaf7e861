"""A 5x7 bitmap font, drawn here so that no font file is needed."""

import functools

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 5, 7
_ROWS = {
    "0": ".###. #...# #...# #...# #...# #...# .###.",
    "1": "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
    "2": ".###. #...# ....# ...#. ..#.. .#... #####",
    "3": "####. ....# ....# .###. ....# ....# ####.",
    "4": "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
    "5": "##### #.... ####. ....# ....# #...# .###.",
    "6": "..##. .#... #.... ####. #...# #...# .###.",
    "7": "##### ....# ...#. ..#.. ..#.. .#... .#...",
    "8": ".###. #...# #...# .###. #...# #...# .###.",
    "9": ".###. #...# #...# .#### ....# ...#. .##..",
    "X": "#...# #...# .#.#. ..#.. .#.#. #...# #...#",
    "C": ".#### #.... #.... #.... #.... #.... .####",
    "E": "##### #.... #.... ####. #.... #.... #####",
    "F": "##### #.... #.... ####. #.... #.... #....",
    "H": "#...# #...# #...# ##### #...# #...# #...#",
    "L": "#.... #.... #.... #.... #.... #.... #####",
    "P": "####. #...# #...# ####. #.... #.... #....",
    "T": "##### ..#.. ..#.. ..#.. ..#.. ..#.. ..#..",
    "U": "#...# #...# #...# #...# #...# #...# .###.",
}
DIGITS = "0123456789"
LETTERS = "CEFHLPTU"
"""Those that stand on tiles without what is searched."""


@functools.cache
def glyph(character: str, scale: int = 1) -> NDArray[np.bool_]:
    """[7 * scale, 5 * scale], true where there is ink; shared, so nobody may write to it."""
    rows = _ROWS[character].split()
    ink = np.array([[dot == "#" for dot in row] for row in rows]).repeat(scale, 0).repeat(scale, 1)
    ink.setflags(write=False)
    return ink
