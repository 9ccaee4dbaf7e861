"""Every field of a model's config.json: what is read, what may have one value only, and what cannot change a number."""

import sys
from collections.abc import Mapping
from typing import Any

from turnwise.errors import EngineError


class NotNative(EngineError):
    """A config that makes sense and asks for what the native decoder does not compute; transformers may."""


READ = {
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "attention_bias",
    "rope_theta", "rope_parameters", "rope_scaling", "original_max_position_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
}  # fmt: skip
CHECKED = {
    "hidden_act", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types", "partial_rotary_factor",
    "quantization_config", "is_causal",
}  # fmt: skip
"""Read only to refuse what this decoder does not compute."""
HARMLESS = {
    # How a model was made, stored or named.
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "transformers.js_config",
    "name_or_path",
    "tokenizer_class", "is_llama_config", "unsloth_version", "unsloth_fixed", "initializer_range", "use_bfloat16",
    # How it is run or trained elsewhere. Dropout is off when a model writes, and this learner has none; slices of
    # tensor-parallel pretraining are the whole when put together.
    "use_cache", "attention_dropout", "pretraining_tp", "chunk_size_feed_forward", "return_dict", "output_attentions",
    "output_hidden_states", "attn_implementation", "gradient_checkpointing", "max_sequence_length", "model_max_length",
    # Of sliding windows, which are refused where they are switched on.
    "max_window_layers",
    # Of other tasks.
    "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "finetuning_task",
    # Of generation, which the run's own config decides.
    "do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens", "min_length", "num_beams",
    "repetition_penalty",
}  # fmt: skip
"""Fields that people write and that no logit depends on; so are all names with a leading underscore."""
ROPE_TYPES: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
"""What each kind of rotary positions reads, besides its name and theta."""
MOST_LAYERS = 10_000
"""More is a slip of the pen, and making so many would take for ever."""
MISTRAL_WINDOW = 4096  # what a Mistral config without the field means
DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
"""What a config without the field means; a Llama config, or null, means as many as there are heads."""


def whole(raw: Mapping[str, Any], key: str) -> int:
    """The positive integer under this key; EngineError for any other value."""
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise EngineError(f"{key} must be a positive integer, found {value!r}")
    return value


def number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """A positive finite number; a missing one is the default, null is not."""
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise EngineError(f"{key} must be a positive number, found {value!r}")
    return float(value)


def flag(raw: Mapping[str, Any], key: str) -> bool:
    """True or false; missing and null are false."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise EngineError(f"{key} must be true or false, found {value!r}")
    return bool(value)


def token_id(raw: Mapping[str, Any], key: str) -> int | None:
    """A token id or none; Llama 2 folders write -1 for none."""
    value = raw.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise EngineError(f"{key} must be a token id, found {value!r}")
    return None if value is None or value < 0 else value


def token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One token id, a list of them, or none."""
    value = raw.get(key)
    ids = [token_id({key: each}, key) for each in value] if isinstance(value, list) else [token_id(raw, key)]
    return tuple(each for each in ids if each is not None)


def refuse_unsupported(model_type: str, raw: Mapping[str, Any]) -> None:
    """Raise for what changes the numbers and is not computed here, and for what nobody here has heard of."""
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise NotNative(f"hidden_act {activation!r} is not supported; supported: silu")
    if raw.get("is_causal", True) is not True:
        raise EngineError("is_causal is not true: a model that sees what comes later cannot write token by token")
    if raw.get("quantization_config"):
        raise EngineError("quantization_config is not supported: use unquantised weights")
    for key in ("mlp_bias", "use_sliding_window"):
        if flag(raw, key):
            raise NotNative(f"{key} is not supported; only full attention and feed-forward layers without bias are")
    if model_type == "mistral" and raw.get("sliding_window", MISTRAL_WINDOW) is not None:
        window = whole({"sliding_window": MISTRAL_WINDOW, **raw}, "sliding_window")
        if window < whole(raw, "max_position_embeddings"):
            context = raw["max_position_embeddings"]
            raise NotNative(
                f"sliding_window {window} below the context of {context} is not supported; only full attention is"
            )
    if whole(raw, "num_hidden_layers") > MOST_LAYERS:
        raise EngineError(f"num_hidden_layers {raw['num_hidden_layers']} is more than the {MOST_LAYERS} supported")
    _refuse_layers(raw)
    unknown = sorted(
        key for key, value in raw.items()
        if key not in READ | CHECKED | HARMLESS and not key.startswith("_") and value not in (None, False, "", [], {})
    )  # fmt: skip
    if unknown:
        raise NotNative(
            f"nothing here knows what {', '.join(unknown)} means, and it may change the model's numbers; "
            "remove the field if it does not"
        )


def _refuse_layers(raw: Mapping[str, Any]) -> None:
    kinds = raw.get("layer_types") or ()
    if not isinstance(kinds, list | tuple):
        raise EngineError(f"layer_types must be a list, found {kinds!r}")
    other = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if other:
        raise NotNative(f"layer_types {other} are not supported; supported: full_attention")


def rope_settings(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of rotary positions and its settings, theta among them.

    As transformers 5 reads them: `rope_scaling` where it says anything, else `rope_parameters`; what neither says
    stands beside them.
    """
    table = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(table, Mapping):
        raise EngineError(f"rope_scaling and rope_parameters must be tables, found {table!r}")
    settings = {"rope_theta": raw.get("rope_theta", 10000.0), **table}
    kind = settings.pop("rope_type", settings.get("type", "default"))
    settings.pop("type", None)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise NotNative(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for rotated in (settings.pop("partial_rotary_factor", None), raw.get("partial_rotary_factor")):
        if rotated not in (None, 1.0):
            raise NotNative("partial_rotary_factor is not supported: the whole head must be rotated")
    unknown = sorted(key for key in settings.keys() - ROPE_TYPES[kind] - {"rope_theta"} if settings[key] is not None)
    if unknown:
        raise NotNative(f"rope type {kind!r} does not read {', '.join(unknown)}; remove what it should not do")
    return kind, settings


def compressed_layers(text: Any) -> str | None:
    """Why no attention of ours can stand in for some layers of a config of transformers, by their `layer_types`; None
    where it can. A short trial would not meet it: the first such key comes after a hundred tokens."""
    for kind in getattr(text, "layer_types", None) or ():
        if "compressed" in str(kind):
            return f"its {kind} layers attend to keys made of several tokens, and ours has one for each token"
    return None
