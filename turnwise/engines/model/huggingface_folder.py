"""Hugging Face folders and our tensors: reads config.json and safetensors into fused matrices, and writes them back."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from turnwise.engines.model.config_fields import (
    DEFAULT_KV_HEADS,
    ROPE_TYPES,
    NotNative,
    flag,
    number,
    refuse_unsupported,
    rope_settings,
    token_id,
    token_ids,
    whole,
)
from turnwise.errors import EngineError
from turnwise.system.files import replacing

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
STORED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Frequency-dependent stretching of positions, as Llama 3.1 does it."""

    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: `RopeConfig(theta=10000.0)`; the factor divides all frequencies unless `llama3` is set."""

    theta: float = 10000.0
    factor: float = 1.0
    llama3: Llama3Rope | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder of the Llama family.

    `DecoderConfig("qwen3", vocab_size=1024, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=32, context_length=2048)`. `model_type` decides the q/k norm (qwen3).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.model_type not in ARCHITECTURES:
            raise EngineError(f"model type {self.model_type!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
        if self.num_heads % self.num_kv_heads:
            raise EngineError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads")
        if self.head_dim % 2:
            raise EngineError(f"head_dim {self.head_dim} is odd, rotary positions need pairs")
        if self.qkv_bias != (self.model_type == "qwen2") and self.model_type in ("qwen2", "mistral"):
            raise EngineError(f"{self.model_type} models {'lack' if self.qkv_bias else 'need'} a qkv bias")
        if self.model_type in ("llama", "qwen3") and self.qkv_bias != self.output_bias:
            raise EngineError(f"{self.model_type} models have attention biases everywhere or nowhere")

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.model_type == "qwen3"


def read_config(folder: Path) -> DecoderConfig:
    """The decoder described by `folder/config.json`, old and new field names alike."""
    raw = read_raw_config(folder)
    try:
        return config_from_hf(raw)
    except EngineError as error:
        raise type(error)(f"{folder / 'config.json'}: {error}") from None


def read_raw_config(folder: Path) -> dict[str, Any]:
    """What `folder/config.json` says."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineError(f"{folder} has no config.json; it is not a Hugging Face model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise EngineError(f"{path} must hold a JSON object, found {type(raw).__name__}")
    return raw


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Our config from a parsed config.json; whatever we do not implement is refused by name."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise NotNative(f"model type {model_type!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    refuse_unsupported(model_type, raw)
    hidden, heads = whole(raw, "hidden_size"), whole(raw, "num_attention_heads")
    shared = {"num_key_value_heads": DEFAULT_KV_HEADS.get(model_type), **raw}
    bias = flag(raw, "attention_bias") and model_type in ("llama", "qwen3")
    return DecoderConfig(
        model_type=model_type,
        vocab_size=whole(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=whole(raw, "intermediate_size"),
        num_layers=whole(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if shared["num_key_value_heads"] is None else whole(shared, "num_key_value_heads"),
        head_dim=_default_head_dim(model_type, hidden, heads)
        if raw.get("head_dim") is None
        else whole(raw, "head_dim"),
        context_length=whole(raw, "max_position_embeddings"),
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope=_read_rope(raw),
        tied=flag(raw, "tie_word_embeddings"),
        qkv_bias=bias or model_type == "qwen2",
        output_bias=bias,
        bos_token_id=token_id(raw, "bos_token_id"),
        eos_token_ids=token_ids(raw, "eos_token_id"),
        pad_token_id=token_id(raw, "pad_token_id"),
    )


def _default_head_dim(model_type: str, hidden: int, heads: int) -> int:
    """Qwen3 configs mean 128 when they say nothing, all others divide the hidden size."""
    if model_type == "qwen3":
        return 128
    if hidden % heads:
        raise EngineError(f"hidden_size {hidden} does not divide into {heads} heads and head_dim is not given")
    return hidden // heads


def _read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    kind, settings = rope_settings(raw)
    lacking = sorted(ROPE_TYPES[kind] - {"original_max_position_embeddings"} - settings.keys())
    if lacking:
        raise EngineError(f"rope type {kind!r} needs {', '.join(lacking)}")
    theta = number(settings, "rope_theta", 10000.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = number(settings, "factor", 1.0)
    if kind == "linear":
        return RopeConfig(theta, factor)
    low, high = number(settings, "low_freq_factor", 1.0), number(settings, "high_freq_factor", 1.0)
    if high <= low:
        raise EngineError(f"high_freq_factor {high} must be above low_freq_factor {low}")
    key = "original_max_position_embeddings"
    places = (raw, settings, {key: whole(raw, "max_position_embeddings")})
    original = next(whole(table, key) for table in places if table.get(key) is not None)
    return RopeConfig(theta, factor, Llama3Rope(low, high, original))


def config_to_hf(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says; rotary settings under their new and their old names, for readers of either age."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope.llama3 is not None:
        rope = {
            "rope_type": "llama3",
            "factor": config.rope.factor,
            "low_freq_factor": config.rope.llama3.low_freq_factor,
            "high_freq_factor": config.rope.llama3.high_freq_factor,
            "original_max_position_embeddings": config.rope.llama3.original_context,
        }
    elif config.rope.factor != 1.0:
        rope = {"rope_type": "linear", "factor": config.rope.factor}
    eos = config.eos_token_ids
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope.theta, **rope},
        "rope_theta": config.rope.theta,
        "rope_scaling": None if rope["rope_type"] == "default" else {"rope_theta": config.rope.theta, **rope},
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": config.pad_token_id,
        "dtype": DTYPE_NAMES[dtype],
    }
    if config.model_type in ("llama", "qwen3"):
        raw["attention_bias"] = config.qkv_bias
    if config.model_type == "mistral":
        raw["sliding_window"] = None
    return raw


@dataclass(frozen=True, slots=True)
class Fused:
    """One of our tensors and the Hugging Face tensors whose rows it stacks, in order, with their row counts."""

    name: str
    sources: tuple[tuple[str, int], ...]
    columns: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the fused tensor; a vector when `columns` is None."""
        rows = sum(rows for _, rows in self.sources)
        return (rows,) if self.columns is None else (rows, self.columns)


def layout(config: DecoderConfig) -> Iterator[Fused]:
    """Every tensor of the decoder: our name, shape and origin. The one place that knows both sets of names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield Fused("embed", (("model.embed_tokens.weight", config.vocab_size),), hidden)
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        attention = theirs + "self_attn."
        projections = ((f"{attention}q_proj", queries), (f"{attention}k_proj", keys), (f"{attention}v_proj", keys))
        yield Fused(ours + "attention_norm", ((theirs + "input_layernorm.weight", hidden),), None)
        yield Fused(ours + "qkv", tuple((name + ".weight", rows) for name, rows in projections), hidden)
        if config.qkv_bias:
            yield Fused(ours + "qkv_bias", tuple((name + ".bias", rows) for name, rows in projections), None)
        if config.qk_norm:
            yield Fused(ours + "q_norm", ((attention + "q_norm.weight", config.head_dim),), None)
            yield Fused(ours + "k_norm", ((attention + "k_norm.weight", config.head_dim),), None)
        yield Fused(ours + "output", ((attention + "o_proj.weight", hidden),), queries)
        if config.output_bias:
            yield Fused(ours + "output_bias", ((attention + "o_proj.bias", hidden),), None)
        yield Fused(ours + "mlp_norm", ((theirs + "post_attention_layernorm.weight", hidden),), None)
        gate, up = theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight"
        yield Fused(ours + "gate_up", ((gate, inner), (up, inner)), hidden)
        yield Fused(ours + "down", ((theirs + "mlp.down_proj.weight", hidden),), inner)
    yield Fused("norm", (("model.norm.weight", hidden),), None)
    if not config.tied:
        yield Fused("head", (("lm_head.weight", config.vocab_size),), hidden)


def read_tensors(folder: Path, config: DecoderConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Our tensors by our names, from one safetensors file or a sharded index; every tensor must be used or known."""
    files = tensor_files(folder)
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as shard:
                tensors.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{path} cannot be read: {error}") from error
    return fuse(tensors, config, dtype, str(folder))


def fuse(tensors: dict[str, Tensor], config: DecoderConfig, dtype: torch.dtype, where: str) -> dict[str, Tensor]:
    """Our tensors by our names from those with Hugging Face names, which are used up; `where` they came from."""
    fused: dict[str, Tensor] = {}
    for part in layout(config):
        _check_part(part, {name: tuple(tensors[name].shape) for name, _ in part.sources if name in tensors}, where)
        pieces = [tensors.pop(name) for name, _ in part.sources]
        for (name, _), piece in zip(part.sources, pieces, strict=True):
            if piece.dtype not in STORED:
                raise EngineError(f"{where}: {name} holds {piece.dtype}; unquantised weights are supported")
        fused[part.name] = torch.cat(pieces).to(dtype)
        if not fused[part.name].isfinite().all():
            raise not_finite(part, where)
    # Two kinds of tensors are redundant: a tied head that says the same, and rotary tables that old folders stored.
    head = tensors.pop("lm_head.weight", None) if config.tied else None
    refuse_other_head(where, head is None or torch.equal(head.to(dtype), fused["embed"]))
    refuse_unread(config, tensors, where)
    return fused


def not_finite(part: Fused, where: str) -> EngineError:
    """What is said of weights that are no numbers."""
    names = ", ".join(name for name, _ in part.sources)
    return EngineError(f"{where}: {names} {'hold' if len(part.sources) > 1 else 'holds'} NaN or infinite weights")


def refuse_other_head(where: str, same: bool) -> None:
    """A head that config.json ties and the files store beside the embedding says the same."""
    if not same:
        raise EngineError(
            f"{where}: lm_head.weight differs from model.embed_tokens.weight, and config.json ties them: "
            "set tie_word_embeddings to false to use it"
        )


def refuse_unread(config: DecoderConfig, names: Iterable[str], where: str) -> None:
    """A tensor that the decoder has no place for: its model is another."""
    known = {name for part in layout(config) for name, _ in part.sources} | (
        {"lm_head.weight"} if config.tied else set()
    )
    unused = [name for name in names if name not in known and not name.endswith("rotary_emb.inv_freq")]
    if unused:
        raise EngineError(f"{where} holds tensors this decoder has no place for: {', '.join(sorted(unused)[:5])}")


def check_folder(folder: Path) -> DecoderConfig:
    """The decoder of a folder whose weights can be opened; none is read."""
    config = read_config(folder)
    check_weights(folder, config.num_layers)
    return config


def check_weights(folder: Path, layers: int, config: DecoderConfig | None = None) -> dict[str, tuple[int, ...]]:
    """Open the files of a folder's weights and read none; a model has a tensor for each of its layers at least, and
    the decoder of this config those it names, in their shapes. Returns the shapes of all."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in tensor_files(folder):
        try:
            with safe_open(path, framework="pt") as shard:
                shapes |= {name: tuple(shard.get_slice(name).get_shape()) for name in shard.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{path} cannot be read: {error}") from error
    if layers > len(shapes):
        raise EngineError(f"{folder}: config.json says {layers} layers, the weights are {len(shapes)} tensors")
    for part in () if config is None else layout(config):
        _check_part(part, shapes, str(folder))
    return shapes


def _check_part(part: Fused, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    if missing := [name for name, _ in part.sources if name not in shapes]:
        raise EngineError(f"{where} lacks the tensors {', '.join(missing)}")
    for name, rows in part.sources:
        expected = (rows, *part.shape[1:])
        if shapes[name] != expected:
            raise EngineError(f"{where}: {name} is {shapes[name]}, config.json says {expected}")


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or those of its index."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise EngineError(f"{index} is not a safetensors index: {error!r}") from error
        if outside := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise EngineError(f"{index} names {outside[0]!r}, which is not a file beside it")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    only = f"; {pickles[0]} is a pickle, which runs code when it is opened" if pickles else ""
    raise EngineError(f"{folder} has no model.safetensors and no model.safetensors.index.json{only}")


def write_config(folder: Path, config: DecoderConfig, dtype: torch.dtype) -> None:
    """config.json as Hugging Face has it, complete or absent."""
    with replacing(folder / "config.json") as file:
        file.write((json.dumps(config_to_hf(config, dtype), indent=2) + "\n").encode())
