"""The bundled tiny model: Qwen3 architecture, own tokenizer, taught the arithmetic task by `recipe.py`."""
