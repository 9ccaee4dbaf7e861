"""From a model's source to a policy model: which implementation computes it and why, its facts, its tokenizer."""

import dataclasses
import functools
import math
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.chat.tokenizer import Tokenizer
from turnwise.config.choices import ModelImplementation
from turnwise.engines.model import gguf_file
from turnwise.engines.model.config_fields import (
    CHECKED,
    HARMLESS,
    MOST_LAYERS,
    READ,
    NotNative,
    compressed_layers,
    whole,
)
from turnwise.engines.model.huggingface_folder import (
    DecoderConfig,
    check_weights,
    config_from_hf,
    fuse,
    layout,
    read_raw_config,
)
from turnwise.engines.model.sources import ModelSource
from turnwise.errors import EngineError, one_line
from turnwise.errors.nearest_name import nearest

if TYPE_CHECKING:
    import torch

    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.model.policy_model import PolicyModel
    from turnwise.engines.model.transformers.model import TransformersModel

LEAST_CONTEXT = 16
"""Less has no room for a question and an answer."""


VISION = re.compile(
    r"(^|\.)(visual|vision_\w+|connector|(multi_modal_)?projector|aligner|mlp_AR|embed_vision|image_newline)(\.|$)"
)
"""In names of weights: what families call their towers and projectors."""


@dataclass(frozen=True, slots=True)
class ImplementationChoice:
    """`ImplementationChoice(ModelImplementation.native, "qwen3 with default rope")`; never `auto`."""

    implementation: ModelImplementation
    reason: str
    notices: tuple[str, ...] = ()
    """What else a person should know before the model runs."""

    def __str__(self) -> str:
        return f"{self.implementation.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model before its weights are read."""

    model_type: str
    vocab_size: int
    context_length: int | None
    """None where the config names no end."""
    layers: int
    cached_numbers: int | None
    """Keys and values of one token in all layers; None where the config does not tell."""
    eos_token_ids: tuple[int, ...]
    weights: int
    """Numbers in all."""
    hidden_size: int | None
    vision: int = 0
    """Numbers of `weights` that are of the tower and projector of a model that sees, by their names."""
    tensors: tuple[int, ...] = ()
    """Numbers of each tensor as it lies in memory, those of tower and projector apart; none where a file tells only how
    many there are in all (GGUF)."""


def choose_implementation(source: ModelSource, wanted: ModelImplementation) -> ImplementationChoice:
    """`auto` takes native where it covers the whole config; what neither computes is an EngineError that says why."""
    auto_map = _auto_map(source)
    own_code = bool(auto_map) and source.trust_remote_code
    notices = [] if source.gguf_file is None else list(gguf_file.notices(source.path))
    try:
        config = _native_config(source)
    except NotNative as refusal:
        if wanted is ModelImplementation.native:
            raise EngineError(f"model.implementation=native: {source.path}: {refusal}") from None
        reason = f"native cannot compute it: {refusal}"
    else:
        if wanted is ModelImplementation.native or (wanted is ModelImplementation.auto and not own_code):
            if auto_map:
                notices.append(_not_run(source, auto_map))
            return ImplementationChoice(ModelImplementation.native, _in_words(config), tuple(notices))
        reason = "the model brings code of its own" if own_code else "asked for with model.implementation"
    _check_transformers(source, reason, auto_map)
    if auto_map and not own_code:
        notices.append(_not_run(source, auto_map))
    notices += _unread(source, own_code)
    return ImplementationChoice(ModelImplementation.transformers, reason, tuple(notices))


def model_facts(source: ModelSource, choice: ImplementationChoice) -> ModelFacts:
    """The facts of a model whose files can be opened; no weight is read."""
    config = None
    if choice.implementation is ModelImplementation.native:
        config = _native_config(source)
        per_layer = 2 * config.num_kv_heads * config.head_dim
        tensors = tuple(math.prod(part.shape) for part in layout(config))
        facts = ModelFacts(
            config.model_type, config.vocab_size, config.context_length, config.num_layers,
            config.num_layers * per_layer, config.eos_token_ids, sum(tensors), config.hidden_size, tensors=tensors,
        )  # fmt: skip
    else:
        facts = _facts_of(source, _auto_config(source, source.path.stat().st_mtime_ns))
    if facts.context_length is not None and facts.context_length < LEAST_CONTEXT:
        raise EngineError(f"{source.path}: a context of {facts.context_length} tokens has no room for a conversation")
    text: dict[str, int] = {}
    total = 0
    if source.gguf_file is None:
        numbers = {name: math.prod(shape) for name, shape in check_weights(source.folder, facts.layers, config).items()}
        total, text = sum(numbers.values()), numbers
        if config is None and reads_images(read_raw_config(source.folder)):
            text = {name: count for name, count in numbers.items() if not VISION.search(name)}
    elif config is None:
        total = gguf_file.read_header(source.path).numbers
    if config is not None:
        return facts
    vision = total - sum(text.values()) if text else 0
    return dataclasses.replace(facts, weights=total, vision=vision, tensors=tuple(text.values()))


def read_tokenizer(source: ModelSource, template: str | None = None) -> Tokenizer:
    """The tokenizer of a model; a GGUF file's is the one its saved policy will have."""
    if source.gguf_file is None:
        return Tokenizer(source.folder, template, trust_remote_code=source.trust_remote_code)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in gguf_file.tokenizer_files(source.path).items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        return Tokenizer(Path(folder), template, name=source.name)


def read_model(source: ModelSource, choice: ImplementationChoice, dtype: "torch.dtype") -> "PolicyModel":
    """The model with its weights, in this number format."""
    if choice.implementation is ModelImplementation.native:
        from turnwise.engines.model.decoder import Decoder

        return Decoder.read(source.folder, dtype) if source.gguf_file is None else _decoder_of_gguf(source, dtype)
    return _transformers_class(source).read(
        source.folder, dtype, gguf_file=source.gguf_file, trust_remote_code=source.trust_remote_code
    )


def read_skeleton(source: ModelSource, choice: ImplementationChoice, dtype: "torch.dtype") -> "PolicyModel":
    """The same model of a folder without its numbers, which its `fill` reads where they are to be."""
    if choice.implementation is ModelImplementation.native:
        from turnwise.engines.model.decoder import Decoder

        return Decoder.skeleton(source.folder, dtype)
    return _transformers_class(source).skeleton(source.folder, dtype, trust_remote_code=source.trust_remote_code)


def _transformers_class(source: ModelSource) -> "type[TransformersModel]":
    if source.gguf_file is None and reads_images(read_raw_config(source.folder)):
        from turnwise.engines.model.vision_model import VisionModel

        return VisionModel
    from turnwise.engines.model.transformers.model import TransformersModel

    return TransformersModel


def reads_images(raw: Mapping[str, Any]) -> bool:
    """Whether the model of this config.json is one that transformers gives images to: by its type, and where that has
    a class for text alone too, by the tower that its config describes."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = raw.get("model_type")
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return False
    parts = (raw.get("vision_config"), raw.get("text_config"))
    return kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or all(isinstance(part, dict) for part in parts)


def add_lora(model: "PolicyModel", rank: int, alpha: float, seed: int) -> "PolicyModel":
    """The same weights, frozen, with factors to train beside them."""
    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.model.lora import LoraDecoder

    if isinstance(model, Decoder):
        return LoraDecoder(model, rank=rank, alpha=alpha, seed=seed)
    from turnwise.engines.model.transformers.model import TransformersModel

    if not isinstance(model, TransformersModel):
        raise EngineError(f"LoRA is not made for {type(model).__name__}; set learner.lora_rank=0")
    return model.with_lora(rank=rank, alpha=alpha, seed=seed)


def train_vision(model: "PolicyModel") -> None:
    """Have tower and projector trained too, which are frozen otherwise."""
    from turnwise.engines.model.vision_model import VisionModel

    if not isinstance(model, VisionModel):
        raise EngineError(f"learner.train_vision=true: {type(model).__name__} reads text only")
    model.train_vision(True)


def _native_config(source: ModelSource) -> DecoderConfig:
    """The native decoder's config; NotNative says what it does not compute."""
    if source.gguf_file is None:
        raw, where = read_raw_config(source.folder), source.folder / "config.json"
    else:
        gguf_file.check_reader()
        raw, where = gguf_file.config_of(source.path), source.path
    try:
        return config_from_hf(raw)
    except NotNative:
        raise
    except EngineError as error:
        raise EngineError(f"{where}: {error}") from None


def _in_words(config: DecoderConfig) -> str:
    rope = "llama3" if config.rope.llama3 is not None else "default" if config.rope.factor == 1.0 else "linear"
    return f"{config.model_type} with {rope} rope"


def _decoder_of_gguf(source: ModelSource, dtype: "torch.dtype") -> "Decoder":
    """Our decoder with the weights that transformers dequantises."""
    from turnwise.engines.model.decoder import Decoder

    config = _native_config(source)
    model = gguf_file.dequantised(source.path, dtype)
    theirs = {key: value for key, value in model.config.to_dict().items() if key in READ | CHECKED}
    if _without_tokens(config_from_hf(theirs)) != _without_tokens(config):
        raise EngineError(f"{source.path}: transformers and Turnwise read different model shapes from its header")
    tensors = dict(model.state_dict())
    del model
    return Decoder(config, fuse(tensors, config, dtype, str(source.path)))


def _without_tokens(config: DecoderConfig) -> DecoderConfig:
    return dataclasses.replace(config, bos_token_id=None, eos_token_ids=(), pad_token_id=None)


# --- transformers ---------------------------------------------------------------------------------------------------


def _auto_map(source: ModelSource) -> dict[str, Any]:
    """The classes in Python files of the model's own that its config.json names."""
    classes = {} if source.gguf_file is not None else read_raw_config(source.folder).get("auto_map")
    return classes if isinstance(classes, dict) else {}


def _not_run(source: ModelSource, auto_map: dict[str, Any]) -> str:
    code = next(iter(auto_map.values()))
    return f"config.json of {source.name} names code of its own ({code}), which is not run: there is a built-in class"


def _check_transformers(source: ModelSource, reason: str, auto_map: dict[str, Any]) -> None:
    """Refuse what transformers cannot compute either, or only with code that nobody trusts."""
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if source.gguf_file is not None:
        gguf_file.check_reader()
        return  # what it does not know it refuses with its config
    raw = read_raw_config(source.folder)
    if raw.get("quantization_config"):
        raise EngineError(f"{source.path}: quantization_config is not supported: use unquantised weights")
    model_type = raw.get("model_type")
    supported = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if isinstance(model_type, str) and model_type in supported:
        return
    if auto_map and not source.trust_remote_code:
        raise EngineError(
            f"{source.path}: transformers {transformers.__version__} has no model type {model_type!r}, and config.json "
            f"names code that comes with the model ({', '.join(map(str, auto_map.values()))}); read it, then set "
            "model.trust_remote_code=true to run it"
        )
    if not auto_map:
        close = nearest(str(model_type), sorted(supported))
        hint = f" {close}" if close.startswith("did") else ""
        raise EngineError(
            f"{source.path}: {reason}; and transformers {transformers.__version__} has no causal language model of the "
            f"type {model_type!r}.{hint}"
        )


@functools.lru_cache(maxsize=4)
def _auto_config(source: ModelSource, changed: int) -> Any:
    """What transformers makes of a config; a GGUF file's takes seconds to read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            source.folder,
            trust_remote_code=source.trust_remote_code,
            **({} if source.gguf_file is None else {"gguf_file": source.gguf_file}),
        )
    except Exception as error:  # the library raises whatever the first broken field makes it stumble over
        raise EngineError(f"{source.path}: its config cannot be read: {one_line(error)[:300]}") from error


def _facts_of(source: ModelSource, config: Any) -> ModelFacts:
    text = config.get_text_config()
    fields = {name: getattr(text, name, None) for name in ("num_hidden_layers", "vocab_size")}
    try:
        layers, vocabulary = (whole(fields, name) for name in fields)
    except EngineError as error:
        raise EngineError(f"{source.path}: {error}") from None
    if layers > MOST_LAYERS:
        raise EngineError(f"{source.path}: num_hidden_layers {layers} is more than the {MOST_LAYERS} supported")
    if (reason := compressed_layers(text)) is not None:
        raise EngineError(f"{source.path}: {reason}")
    context = getattr(text, "max_position_embeddings", None)
    ends = getattr(text, "eos_token_id", None)
    return ModelFacts(
        str(config.model_type),
        vocabulary,
        context if isinstance(context, int) and context > 0 else None,
        layers,
        _cached_numbers(text, layers),
        tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (ends,),
        0,
        getattr(text, "hidden_size", None),
    )


def _cached_numbers(text: Any, layers: int) -> int | None:
    """Keys and values of a token, as if every layer were one of plain or latent attention: an upper bound."""
    numbers = [_layer_numbers(layer) for layer in _layer_configs(text, layers)]
    return None if None in numbers else sum(number for number in numbers if number is not None)


def _layer_configs(text: Any, layers: int) -> list[Any]:
    """The config of every layer. Where layers differ (Gemma 4's heads), transformers refuses to tell a field of all."""
    if not getattr(text, "is_heterogeneous", False):
        return [text] * layers
    return [text.per_layer_config[index] for index in range(layers)]


def _layer_numbers(layer: Any) -> int | None:
    heads, hidden = getattr(layer, "num_attention_heads", None), getattr(layer, "hidden_size", None)
    shared = getattr(layer, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(hidden, int) or not isinstance(shared, int):
        return None
    size = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None) or hidden // heads
    # Until 5.22 transformers gave the larger heads of Gemma 4's global layers a field of their own.
    size = max(size, getattr(layer, "global_head_dim", None) or 0)
    wide = getattr(layer, "v_head_dim", None) or size
    return int(shared * (size + wide))


def _unread(source: ModelSource, own_code: bool) -> list[str]:
    """A notice for fields that transformers' class does not declare, and nobody may read."""
    if own_code or source.gguf_file is not None:
        return []
    from transformers import CONFIG_MAPPING

    raw = read_raw_config(source.folder)
    theirs = CONFIG_MAPPING[raw["model_type"]]
    declared = {field.name for field in dataclasses.fields(theirs)} | set(theirs.attribute_map)
    left = vars(_auto_config(source, source.path.stat().st_mtime_ns))  # a field that was taken in is no longer there
    unread = sorted(
        key for key, value in raw.items()
        if key in left and key not in declared | READ | CHECKED | HARMLESS
        and not key.startswith("_") and value not in (None, False, "", [], {})
    )  # fmt: skip
    if not unread:
        return []
    return [f"transformers’ {theirs.__name__} declares no {', '.join(unread)}, and may compute the model without it"]
