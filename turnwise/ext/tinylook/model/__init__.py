"""The bundled tiny vision-language model: Qwen3-VL's architecture, taught to look before it answers
(examples/tiny_vision/recipe.py)."""
