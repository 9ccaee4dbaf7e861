"""The bundled tiny vision-language model: Qwen3-VL's architecture, taught by `recipe.py` to look before it answers."""
