"""The recipe of the bundled vision model, loaded from examples/ as a user would run it: its files import one another."""

import sys
from pathlib import Path

import turnwise.ext.tinylook.model

SHIPPED = Path(turnwise.ext.tinylook.model.__file__).parent
"""The folder of the bundled model."""
sys.path.append(str(Path(__file__).parents[1] / "examples" / "tiny_vision"))

import recipe  # noqa: E402
from demonstrations import DILIGENT, Habits, Taught, Trace, encode, pad, trace_of  # noqa: E402
from folder import IMAGE, make_processor, make_tokenizer, write_folder  # noqa: E402
from network import TOKENS, fresh_model, look, patches, run_text  # noqa: E402
from sketches import FINE, GLYPHS, INKS, looks  # noqa: E402

__all__ = [
    "DILIGENT", "FINE", "GLYPHS", "IMAGE", "INKS", "SHIPPED", "TOKENS", "Habits", "Taught", "Trace", "encode",
    "fresh_model", "look", "looks", "make_processor", "make_tokenizer", "pad", "patches", "recipe", "run_text",
    "trace_of", "write_folder",
]  # fmt: skip
