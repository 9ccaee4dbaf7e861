"""Whether a server that others started has our model: the sizes that its config tells against those of ours."""

import json
from collections.abc import Mapping
from typing import Any

from turnwise.errors import EngineError

SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "vocab_size": "vocabulary",
    "intermediate_size": "intermediate",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key and value heads",
}
"""Names of a Hugging Face config, and what they are called in a refusal."""
VISION = {
    "hidden_size": "hidden of the vision tower",
    "depth": "vision layers",
    "num_hidden_layers": "vision layers",
    "patch_size": "pixels a patch",
}
"""The same of its `vision_config`, where a model has one."""

Sizes = Mapping[str, int]


def sizes_of(config: Any) -> dict[str, int]:
    """Of a model's config, or of its text part; nothing of what is none.

    vLLM tells its own as an object, or as the text that Python prints of it: a class and JSON behind it.
    """
    if isinstance(config, str):
        try:
            config = json.loads(config[config.index("{") :])
        except (ValueError, RecursionError):
            return {}
    if not isinstance(config, Mapping):
        return {}
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, Mapping) else config
    tower = config.get("vision_config")
    seen = tower if isinstance(tower, Mapping) else {}
    sizes = {name: merged[name] for name in SIZES if type(merged.get(name)) is int}
    return sizes | {f"vision {name}": seen[name] for name in VISION if type(seen.get(name)) is int}


def refuse_other(name: str, ours: Sizes, theirs: Sizes) -> None:
    """EngineError where a size that both tell differs: weights must not be pushed into it, nor turns be asked of it."""
    differing = [
        f"{theirs[key]} {words} where the policy has {ours[key]}"
        for key, words in [*SIZES.items(), *((f"vision {name}", words) for name, words in VISION.items())]
        if key in ours and key in theirs and ours[key] != theirs[key]
    ]
    if differing:
        raise EngineError(
            f"{name} serves another model: {', '.join(differing)}; start it with the model of model.path, or name its "
            "model there"
        )
