"""How Megatron-core cuts a decoder into a grid of ranks: names, which axis is cut, heads by group, gate beside up."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.errors import ConfigError, EngineError, StorageError
from turnwise.ext.weights.expected_tensors import EMBEDDING, HEAD
from turnwise.ext.weights.lazy_tensor import Stored, same_bits

WORDS, FINAL_NORM, OUTPUT = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"
LAYER = "decoder.layers."
ALSO = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Names that layers without Transformer Engine have, and what it calls the same."""


class Cut(Enum):
    """What the ranks of a tensor-parallel group hold of a tensor."""

    copies = "every rank the whole"
    rows = "its rows"
    columns = "its columns"
    groups = "query, key and value heads of its groups, group after group"
    halves = "its rows of the gate, then its rows of the up matrix"


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Megatron's name and the Hugging Face names: `TensorSlot(FINAL_NORM, Cut.copies, ("model.norm.weight",))`."""

    name: str
    cut: Cut
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParallelGrid:
    """Ranks that share each layer, stages of layers, and turns of each stage: `ParallelGrid(tensor=2, pipeline=2)`."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(turn, stage) in the order in which a token passes them."""
        return ((turn, stage) for turn in range(self.virtual) for stage in range(self.pipeline))


def check_grid(grid: ParallelGrid, config: DecoderConfig) -> None:
    """Refuse a grid that the model cannot be cut into."""
    heads = {"key/value heads": config.num_kv_heads, "rows of the gate": config.intermediate_size}
    for what, number in heads.items():
        if number % grid.tensor:
            raise ConfigError(
                f"--tp {grid.tensor}: {number} {what} cannot be shared evenly; take a divisor of {number}"
            )
    parts = grid.pipeline * grid.virtual
    if config.num_layers % parts:
        raise ConfigError(
            f"--pp {grid.pipeline} --vpp {grid.virtual}: {config.num_layers} layers cannot be shared evenly by {parts} "
            "parts"
        )
    if grid.virtual > 1 and grid.pipeline == 1:
        raise ConfigError(f"--vpp {grid.virtual}: turns need several stages, and --pp is 1")


def layer_slots(config: DecoderConfig, theirs: int, ours: int) -> Iterator[TensorSlot]:
    """The tensors of a layer: `theirs` is its number within a part of the grid, `ours` within the model."""
    name, source = f"{LAYER}{theirs}.", f"model.layers.{ours}."
    heads = tuple(f"{source}self_attn.{part}_proj" for part in "qkv")
    yield TensorSlot(
        f"{name}self_attention.linear_qkv.layer_norm_weight", Cut.copies, (f"{source}input_layernorm.weight",)
    )
    yield TensorSlot(f"{name}self_attention.linear_qkv.weight", Cut.groups, tuple(f"{head}.weight" for head in heads))
    if config.qkv_bias:
        yield TensorSlot(f"{name}self_attention.linear_qkv.bias", Cut.groups, tuple(f"{head}.bias" for head in heads))
    if config.qk_norm:
        yield TensorSlot(f"{name}self_attention.q_layernorm.weight", Cut.copies, (f"{source}self_attn.q_norm.weight",))
        yield TensorSlot(f"{name}self_attention.k_layernorm.weight", Cut.copies, (f"{source}self_attn.k_norm.weight",))
    yield TensorSlot(f"{name}self_attention.linear_proj.weight", Cut.columns, (f"{source}self_attn.o_proj.weight",))
    if config.output_bias:
        yield TensorSlot(f"{name}self_attention.linear_proj.bias", Cut.copies, (f"{source}self_attn.o_proj.bias",))
    yield TensorSlot(
        f"{name}mlp.linear_fc1.layer_norm_weight", Cut.copies, (f"{source}post_attention_layernorm.weight",)
    )
    gate_up = (f"{source}mlp.gate_proj.weight", f"{source}mlp.up_proj.weight")
    yield TensorSlot(f"{name}mlp.linear_fc1.weight", Cut.halves, gate_up)
    yield TensorSlot(f"{name}mlp.linear_fc2.weight", Cut.columns, (f"{source}mlp.down_proj.weight",))


def part_slots(config: DecoderConfig, first: int, layers: int, *, begins: bool, ends: bool) -> Iterator[TensorSlot]:
    """The tensors of a part of the grid that has `layers` layers from `first` on."""
    if begins:
        yield TensorSlot(WORDS, Cut.rows, (EMBEDDING,))
    for index in range(layers):
        yield from layer_slots(config, index, first + index)
    if ends:
        yield TensorSlot(FINAL_NORM, Cut.copies, ("model.norm.weight",))
        # Where the embedding is tied and lies on another stage, the last one has a copy to make logits with.
        if not config.tied or not begins:
            yield TensorSlot(OUTPUT, Cut.rows, (EMBEDDING if config.tied else HEAD,))


# --- from the ranks of a tensor-parallel group ----------------------------------------------------------------------


def joined(slot: TensorSlot, ranks: Sequence[Stored], config: DecoderConfig) -> dict[str, Stored]:
    """The Hugging Face tensors of a slot, from what each rank of the group holds."""
    shape, dtype = ranks[0].shape, ranks[0].dtype
    if any(rank.shape != shape or rank.dtype != dtype for rank in ranks):
        raise StorageError(f"{slot.name} is not of one shape and number format on all {len(ranks)} ranks")
    if len(shape) != (1 if slot.name.endswith(("bias", "norm_weight", "layernorm.weight")) else 2):
        raise StorageError(f"{slot.name} has {len(shape)} axes, which is not expected")
    many = len(ranks)
    match slot.cut:
        case Cut.copies:
            return {slot.sources[0]: Stored(dtype, shape, lambda: _copy(slot.name, ranks))}
        case Cut.columns:
            wide = (shape[0], shape[1] * many)
            return {slot.sources[0]: Stored(dtype, wide, lambda: torch.cat([rank.read() for rank in ranks], 1))}
        case Cut.rows:
            return {slot.sources[0]: _vocabulary(slot, ranks, config.vocab_size)}
        case Cut.halves:
            if shape[0] % 2:
                raise StorageError(f"{slot.name} has {shape[0]} rows, so they are not a gate and an equal up matrix")
            half = (shape[0] // 2 * many, *shape[1:])
            return {
                source: Stored(dtype, half, _rows(ranks, lambda rank, side=side: rank.chunk(2)[side]))  # type: ignore[misc]
                for side, source in enumerate(slot.sources)
            }
    return _heads(slot, ranks, config)


def _copy(name: str, ranks: Sequence[Stored]) -> Tensor:
    first = ranks[0].read()
    for index, rank in enumerate(ranks[1:], 1):
        if not same_bits(first, rank.read()):
            raise StorageError(
                f"{name} differs between the tensor-parallel ranks 0 and {index}, where it must be the same"
            )
    return first


def _rows(ranks: Sequence[Stored], part: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    return lambda: torch.cat([part(rank.read()) for rank in ranks])


def _vocabulary(slot: TensorSlot, ranks: Sequence[Stored], words: int) -> Stored:
    """Rows past the vocabulary, which pad it to a size that the ranks can share, are cut off."""
    rows, hidden = ranks[0].shape
    if rows * len(ranks) < words:
        raise StorageError(f"{slot.name} has {rows * len(ranks)} rows on all ranks, config.json says {words}")
    return Stored(ranks[0].dtype, (words, hidden), lambda: torch.cat([rank.read() for rank in ranks])[:words])


def _heads(slot: TensorSlot, ranks: Sequence[Stored], config: DecoderConfig) -> dict[str, Stored]:
    groups, sizes = config.num_kv_heads // len(ranks), _head_rows(config)
    shape = ranks[0].shape
    if config.num_kv_heads % len(ranks) or shape[0] != groups * sum(sizes):
        raise StorageError(
            f"{slot.name} has {shape[0]} rows on each of {len(ranks)} ranks; config.json says {config.num_kv_heads} "
            f"groups of {sum(sizes)} rows in all"
        )

    def part(rank: Tensor, which: int) -> Tensor:
        by_group = rank.view(groups, sum(sizes), *shape[1:])
        return torch.split(by_group, sizes, 1)[which].reshape(groups * sizes[which], *shape[1:])

    return {
        source: Stored(
            ranks[0].dtype,
            (config.num_kv_heads * sizes[which], *shape[1:]),
            _rows(ranks, lambda rank, which=which: part(rank, which)),  # type: ignore[misc]
        )
        for which, source in enumerate(slot.sources)
    }


def _head_rows(config: DecoderConfig) -> list[int]:
    """Rows of the queries, the key and the value of one group."""
    return [config.num_heads // config.num_kv_heads * config.head_dim, config.head_dim, config.head_dim]


# --- to a rank ------------------------------------------------------------------------------------------------------


def share(
    slot: TensorSlot, tensors: Mapping[str, Stored], config: DecoderConfig, rank: int, ranks: int, multiple: int
) -> Tensor:
    """What one rank of a group holds of a slot, as a copy; its share of a vocabulary is padded to `multiple` rows."""
    sources = [tensors[name].read() for name in slot.sources]
    match slot.cut:
        case Cut.copies:
            part = sources[0]
        case Cut.columns:
            part = sources[0].chunk(ranks, 1)[rank]
        case Cut.halves:
            part = torch.cat([source.chunk(ranks)[rank] for source in sources])
        case Cut.groups:
            sizes = _head_rows(config)
            by_group = [
                source.view(config.num_kv_heads, rows, *source.shape[1:]).chunk(ranks)[rank]
                for source, rows in zip(sources, sizes, strict=True)
            ]
            part = torch.cat(by_group, 1).flatten(0, 1)
        case Cut.rows:
            words, hidden = sources[0].shape
            rows = -(-words // (multiple * ranks)) * multiple
            part = torch.zeros(rows, hidden, dtype=sources[0].dtype)
            own = sources[0][rank * rows : (rank + 1) * rows]
            part[: len(own)] = own
    return part.clone(memory_format=torch.contiguous_format)


def part_of(config: DecoderConfig, grid: ParallelGrid, turn: int, stage: int) -> tuple[int, int]:
    """The first layer of a part of an even grid, and how many it has."""
    layers = config.num_layers // (grid.pipeline * grid.virtual)
    return (turn * grid.pipeline + stage) * layers, layers


def refuse_other_families(config: DecoderConfig | None, where: str) -> DecoderConfig:
    """Only the native families have a layout here."""
    if config is None:
        raise EngineError(
            f"{where}: Megatron's layout is known here for llama, mistral, qwen2 and qwen3 without experts, and this "
            "model is another"
        )
    return config
