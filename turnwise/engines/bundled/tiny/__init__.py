"""The bundled tiny model: Qwen3 architecture, taught the arithmetic task (examples/tiny_model/recipe.py)."""
