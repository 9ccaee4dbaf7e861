"""The closed language of `tinylook`: every prompt, call, reply and answer is made of the pieces of `VOCABULARY`.

A conversation, with the 64x64 view of the canvas before the question:

    user       <image>digit at red
    assistant  <tool_call>\\n{"name": "look", "arguments": {"box": [3, 5, 7, 9]}}\\n</tool_call>
    tool       seen<image>
    assistant  <answer>7</answer>

Calls are in the hermes format (`chat.tool_format=hermes`). A box is [left, upper, right, lower] in sixteenths of the
canvas, whole numbers from 0 to 16; `"turn": 90|180|270` turns what was cut out clockwise, `"contrast": true` stretches
its grey levels, in this order: `{"box": [3, 5, 7, 9], "turn": 90, "contrast": true}`. The reply is `SEEN` and the cut
region as an image of the size of the view; a box that holds nothing is answered with `NOWHERE`.

Pieces are matched greedily, the longest first, and a text is the pieces joined with nothing between them (`pieces`).
A space between words is a piece of its own, so that a word is the same piece in a question and in an answer; every
number from 0 to 30 is one. The printable ASCII characters and the newline close the vocabulary: any other text of ours,
such as the error for a call that cannot be read, can be written with them. A tokenizer adds what its chat template
needs (roles, image tokens).
"""

import enum
import string
from collections.abc import Sequence

from turnwise.ext.tinylook.look_grid import NOWHERE, SEEN, TURNS

CANVAS = 256
"""Pixels of the side of what tools read; VIEW are those of what the policy is shown."""


class Puzzle(enum.StrEnum):
    """The kinds of question, and what each needs."""

    READ = "read"
    """The digit beside a coloured mark: one look."""
    SEARCH = "search"
    """The digit beside the one X among faint tiles: a coarse look, then a fine one."""
    COUNT = "count"
    """The dots of a colour among others."""
    COMPARE = "compare"
    """Which of two digits is larger: two looks."""
    ROTATE = "rotate"
    """A digit on a canvas that lies on its side or head; a bar marks the upper edge."""
    CONTRAST = "contrast"
    """A digit hardly darker than what is around it."""
    COMPUTE = "compute"
    """The sum or the largest of a row of digits."""
    NONE = "none"
    """The colour of a large shape: it can be seen without looking."""
    PRIOR = "prior"
    """As `read`, with the same digit in most images: a guess pays."""


COLOURS = ("red", "green", "blue", "yellow", "purple", "orange")
SHAPES = ("circle", "square", "triangle")
SIDES = ("left", "right")
ROWS = ("top", "bottom")
SUMS = ("sum", "max")
SEARCHED = "X"
LARGEST_NUMBER = 30
OPEN_CALL = '<tool_call>\n{"name": "look", "arguments": {"box": ['
TURN = '], "turn": '
CONTRAST = ', "contrast": true'
CLOSE_CALL = "}}\n</tool_call>"
OPEN_ANSWER, CLOSE_ANSWER = "<answer>", "</answer>"

_WORDS = (
    *("digit", "at", "find", SEARCHED, "count", "compare", "turned", "faint", "code", "colour", "of"),
    *(*SUMS, *ROWS, *SIDES, *COLOURS, *SHAPES, SEEN, "Error: ", NOWHERE),
)
_CALL = (OPEN_CALL, ", ", TURN, "]" + CONTRAST, CONTRAST, "]" + CLOSE_CALL, CLOSE_CALL)
_NUMBERS = (*(str(number) for number in range(LARGEST_NUMBER + 1)), *map(str, TURNS))
_CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))
VOCABULARY: tuple[str, ...] = tuple(
    dict.fromkeys((*_CALL, OPEN_ANSWER, CLOSE_ANSWER, "<tool_call>", "</tool_call>", *_WORDS, *_NUMBERS, *_CHARACTERS))
)
"""Whole tokens, each once."""
_LONGEST_FIRST = sorted(VOCABULARY, key=len, reverse=True)
_BY_START = {start: [one for one in _LONGEST_FIRST if one[0] == start] for start in ("\n", *string.printable) if start}


def pieces(text: str) -> list[str]:
    """A text in pieces of the vocabulary, the longest first; ValueError for a character that it does not have."""
    result, position = [], 0
    while position < len(text):
        piece = next(
            (candidate for candidate in _BY_START.get(text[position], ()) if text.startswith(candidate, position)), None
        )
        if piece is None:
            raise ValueError(f"{text[position]!r} is not in the vocabulary")
        result.append(piece)
        position += len(piece)
    return result


def call_text(box: Sequence[int], turn: int | None = None, contrast: bool = False) -> str:
    """A look as the policy writes it, in the hermes format."""
    numbers = ", ".join(map(str, box))
    turned = f"{TURN}{turn}" if turn else "]"
    return f"{OPEN_CALL}{numbers}{turned}{CONTRAST if contrast else ''}{CLOSE_CALL}"


def answer_text(answer: str) -> str:
    """An answer as the policy writes it."""
    return f"{OPEN_ANSWER}{answer}{CLOSE_ANSWER}"


def read_question(puzzle: Puzzle, *, colour: str = "", row: str = "", shape: str = "") -> str:
    """What is asked: `digit at red`, `sum top`, `colour of circle`; `row` holds both words of a `compute`."""
    match puzzle:
        case Puzzle.READ:
            return f"digit at {colour}"
        case Puzzle.PRIOR:
            return f"code at {colour}"
        case Puzzle.SEARCH:
            return f"find {SEARCHED}"
        case Puzzle.COUNT:
            return f"count {colour}"
        case Puzzle.COMPARE:
            return f"compare {colour}"
        case Puzzle.ROTATE:
            return f"turned digit at {colour}"
        case Puzzle.CONTRAST:
            return f"faint digit at {colour}"
        case Puzzle.COMPUTE:
            return row
        case Puzzle.NONE:
            return f"colour of {shape}"
