"""The recipe of the bundled model, loaded from examples/ as a user would run it."""

import importlib.util
from pathlib import Path

_PATH = Path(__file__).parents[1] / "examples" / "tiny_model" / "recipe.py"
_SPEC = importlib.util.spec_from_file_location("tiny_model_recipe", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
recipe = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(recipe)

SHAPE, make_tokenizer = recipe.SHAPE, recipe.make_tokenizer
