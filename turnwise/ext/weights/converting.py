"""A Hugging Face folder to Megatron and back, with the proof that both are one model where that is asked for.

The proof is the round trip bit by bit, and the logits of both. The grid's logits are computed as Megatron's ranks
would, each with what it holds: a mistake that cutting and joining make alike, such as heads in the wrong order, shows
there and not in the round trip.
"""

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from turnwise.engines.model.attention import packed, positions
from turnwise.engines.model.decoder import Decoder, rope_angles
from turnwise.engines.model.huggingface_folder import DecoderConfig, fuse
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.errors import ConfigError, EngineError
from turnwise.ext.weights.distributed import read_distributed
from turnwise.ext.weights.expected_tensors import fitting
from turnwise.ext.weights.fused_tensors import apart
from turnwise.ext.weights.lazy_tensor import Stored, read_safetensors, same_bits
from turnwise.ext.weights.megatron import count_layers, read_parts, write_megatron
from turnwise.ext.weights.megatron_distributed import distributed_part, is_megatron, write_distributed
from turnwise.ext.weights.megatron_layout import (
    LAYER,
    MegatronModel,
    ParallelGrid,
    TensorSlot,
    check_grid,
    megatron_model,
    share,
)
from turnwise.ext.weights.megatron_names import OUTPUT, Cut
from turnwise.ext.weights.merging import Merge, MergePlan, write_merge
from turnwise.ext.weights.model_folder import Advance, Form, appearing, carry, one_format, write_manifest
from turnwise.ext.weights.sources import CheckpointKind, SourceCheckpoint

Parts = Mapping[tuple[int, int, int], Mapping[str, Stored]]
"""By (turn, stage, tensor rank): tensors by Megatron's names."""
TOKENS, SEED = 24, 0
CLOSE = 1e-3
"""Of the largest logit: sums over ranks and layers round elsewhere, in float32."""


@dataclass(frozen=True, slots=True)
class Proof:
    """`Proof(tensors=290, largest_gap=3e-6)`."""

    tensors: int
    largest_gap: float | None
    """Between the logits of both, as a share of the largest; None for a model that our decoder does not compute."""

    def __str__(self) -> str:
        logits = (
            f"logits of {TOKENS} tokens within {self.largest_gap:.1e} of the largest"
            if self.largest_gap is not None
            else "logits not compared: only llama, mistral, qwen2 and qwen3 are computed here"
        )
        return f"verified: {self.tensors} tensors there and back bit by bit, {logits}"


def verify(
    grid: ParallelGrid, parts: Parts, tensors: Mapping[str, Stored], model: MegatronModel, dtype: torch.dtype | None
) -> Proof:
    """Hold a grid against the Hugging Face tensors of the same model, both in `dtype` where one was changed to it."""
    if dtype is not None:
        parts = {key: _in_format(part, dtype) for key, part in parts.items()}
        tensors = _in_format(tensors, dtype)
    compared, plain = 0, apart(tensors)
    first, chunks = 0, list(grid.chunks())
    for number, (turn, stage) in enumerate(chunks):
        layers = count_layers(parts[turn, stage, 0], model, f"stage {stage}, turn {turn}")
        ends = number == len(chunks) - 1
        for slot in model.part(first, layers, begins=number == 0, ends=ends):
            for rank in range(grid.tensor):
                stored = parts[turn, stage, rank].get(slot.name)
                if stored is None and slot.name == model.prefix + OUTPUT and model.tied:
                    continue  # a tied head that is not kept
                if stored is None or not _same(slot, stored.read(), plain, rank, grid.tensor):
                    raise EngineError(
                        f"{slot.name} of stage {stage}, turn {turn}, rank {rank} changed in the conversion"
                    )
                compared += 1
        first += layers
    config = model.expected.config
    return Proof(compared, None if config is None else _logits_gap(grid, parts, tensors, config))


def _logits_gap(grid: ParallelGrid, parts: Parts, tensors: Mapping[str, Stored], config: DecoderConfig) -> float:
    """Between the logits of our decoder and of the grid, as a share of the largest."""
    tokens = torch.randint(config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(SEED))
    with torch.inference_mode():
        whole = {name: stored.read() for name, stored in tensors.items()}
        decoder = Decoder(config, fuse(whole, config, torch.float32, "the model"))
        wanted = decoder.logits(decoder(ModelInputs(tokens, positions([TOKENS])), packed([TOKENS])))
        logits = grid_logits(grid, parts, config, tokens)
    gap = float((logits - wanted).abs().max() / wanted.abs().max())
    if not gap <= CLOSE:
        raise EngineError(f"the grid's logits are off by {gap:.1e} of the largest: it is not the same model")
    return gap


def _in_format(tensors: Mapping[str, Stored], dtype: torch.dtype) -> dict[str, Stored]:
    return {
        name: Stored(dtype, stored.shape, functools.partial(_read_as, stored, dtype))
        for name, stored in tensors.items()
    }


def _read_as(stored: Stored, dtype: torch.dtype) -> Tensor:
    return stored.read().to(dtype)


def _same(slot: TensorSlot, held: Tensor, plain: Mapping[str, Stored], rank: int, ranks: int) -> bool:
    """Whether a rank holds its share of a slot; rows that pad the vocabulary say nothing."""
    if slot.cut is not Cut.words:
        return same_bits(held, share(slot, plain, rank, ranks, 1))
    own = plain[slot.sources[0]].read()[rank * len(held) : (rank + 1) * len(held)]
    return same_bits(held[: len(own)], own)


# --- the pass of a grid ---------------------------------------------------------------------------------------------


WORDS, FINAL_NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"


def grid_logits(grid: ParallelGrid, parts: Parts, config: DecoderConfig, tokens: Tensor) -> Tensor:
    """Logits [T, V] of one sequence, every rank with its own tensors, in float32."""
    chunks = list(grid.chunks())
    cos, sin = (table[: len(tokens)] for table in rope_angles(config.rope, config.head_dim, len(tokens)))
    x = _embedded([parts[(*chunks[0], rank)] for rank in range(grid.tensor)], tokens)
    for turn, stage in chunks:
        ranks = [parts[turn, stage, rank] for rank in range(grid.tensor)]
        for index in range(sum(name.endswith("linear_qkv.weight") for name in ranks[0])):
            x = _layer([_of_layer(rank, index) for rank in ranks], config, x, cos, sin)
    ranks = [parts[(*chunks[-1], rank)] for rank in range(grid.tensor)]
    x = _norm(x, ranks[0][FINAL_NORM].read(), config.norm_eps)
    heads = [rank[OUTPUT if OUTPUT in rank else WORDS].read().float() for rank in ranks]
    return torch.cat([x @ head.T for head in heads], -1)[:, : config.vocab_size]


def _of_layer(part: Mapping[str, Stored], index: int) -> dict[str, Tensor]:
    start = f"{LAYER}{index}."
    return {name.removeprefix(start): stored.read().float() for name, stored in part.items() if name.startswith(start)}


def _embedded(ranks: list[Mapping[str, Stored]], tokens: Tensor) -> Tensor:
    """Each rank looks up the words it has and adds nothing for the others."""
    parts = []
    for rank, part in enumerate(ranks):
        words = part[WORDS].read().float()
        places = tokens - rank * len(words)
        mine = (places >= 0) & (places < len(words))
        parts.append(words[places.clamp(0, len(words) - 1)] * mine[:, None])
    return torch.stack(parts).sum(0)


def _layer(ranks: list[dict[str, Tensor]], config: DecoderConfig, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    normed = _norm(x, ranks[0]["self_attention.linear_qkv.layer_norm_weight"], config.norm_eps)
    mixed = [_attention(rank, config, normed, cos, sin) for rank in ranks]
    bias = ranks[0].get("self_attention.linear_proj.bias")
    x = x + torch.stack(mixed).sum(0) + (0.0 if bias is None else bias)
    normed = _norm(x, ranks[0]["mlp.linear_fc1.layer_norm_weight"], config.norm_eps)
    fed = []
    for rank in ranks:
        gate, up = (normed @ rank["mlp.linear_fc1.weight"].T).chunk(2, -1)
        fed.append((functional.silu(gate) * up) @ rank["mlp.linear_fc2.weight"].T)
    return x + torch.stack(fed).sum(0)


def _attention(rank: dict[str, Tensor], config: DecoderConfig, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One rank's groups: of each, several query heads, then their key head, then their value head."""
    size, queries = config.head_dim, config.num_heads // config.num_kv_heads
    mixed = functional.linear(x, rank["self_attention.linear_qkv.weight"], rank.get("self_attention.linear_qkv.bias"))
    heads = mixed.view(len(x), -1, queries + 2, size)
    q, k, v = torch.split(heads, [queries, 1, 1], 2)
    if config.qk_norm:
        q = _norm(q, rank["self_attention.q_layernorm.weight"], config.norm_eps)
        k = _norm(k, rank["self_attention.k_layernorm.weight"], config.norm_eps)
    q, k = (_rotated(part, cos, sin) for part in (q, k))
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    scores = torch.einsum("tgqd,sgd->gqts", q, k.squeeze(2)) * size**-0.5
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    heads_out = torch.einsum("gqts,sgd->tgqd", weights, v.squeeze(2))
    return heads_out.flatten(1) @ rank["self_attention.linear_proj.weight"].T


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    c, s = cos[:, None, None], sin[:, None, None]
    return torch.cat((low * c - high * s, high * c + low * s), -1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


COMPANIONS = "huggingface"


class MegatronFormat(enum.Enum):
    """Megatron's two formats of a checkpoint."""

    grid = "grid"
    """A file of each rank (`--ckpt-format torch`)."""
    distributed = "distributed"
    """Whole tensors that ranks of any grid load (`torch_dist`)."""


@dataclass(frozen=True, slots=True)
class ToMegatron:
    """How a checkpoint is made: `ToMegatron(ParallelGrid(tensor=2), torch.bfloat16)`."""

    grid: ParallelGrid
    dtype: torch.dtype | None = None
    multiple: int = 128
    """A rank's share of the vocabulary is padded to a multiple of this, as Megatron does by default."""
    verify: bool = False
    force: bool = False
    layout: MegatronFormat = MegatronFormat.grid


def to_megatron(source: Path, target: Path, how: ToMegatron, begin: Callable[[int], Advance]) -> Proof | None:
    """Write the checkpoint, config and tokenizer in `huggingface` beside it; it appears whole and checked or not."""
    checkpoint = SourceCheckpoint(CheckpointKind.hugging_face, source, source)
    expected = checkpoint.expected()
    model = megatron_model(expected, str(source))
    check_grid(how.grid, model)
    tensors = fitting(read_safetensors(source), expected, str(source))
    form = Form(how.dtype)
    width = sum(stored.bytes // stored.dtype.itemsize * form.of(stored).itemsize for stored in tensors.values())
    advance = begin(width)
    with appearing(target, how.force, source) as folder:
        if how.layout is MegatronFormat.grid:
            write_megatron(folder, tensors, model, how.grid, dtype=how.dtype, multiple=how.multiple, advance=advance)
        else:
            write_distributed(folder, tensors, model, dtype=how.dtype, multiple=how.multiple, advance=advance)
        (folder / COMPANIONS).mkdir()
        carry(source, folder / COMPANIONS, one_format(tensors, form))
        write_manifest(folder, {"kind": checkpoint.kind.name, "files": checkpoint.files()})
        if not how.verify:
            return None
        kind = CheckpointKind.megatron if how.layout is MegatronFormat.grid else CheckpointKind.distributed
        written = SourceCheckpoint(kind, folder / "release", folder / COMPANIONS)
        return verify(*parts_of(written, model), tensors, model, how.dtype)


def from_megatron(plan: MergePlan, target: Path, merge: Merge, advance: Advance, *, check: bool) -> Proof | None:
    """Write the Hugging Face folder of a grid, and hold it against the grid before it gets its name."""
    if not check:
        write_merge(plan, target, merge, advance)
        return None
    proofs: list[Proof] = []

    def prove(folder: Path) -> None:
        model = megatron_model(plan.expected, plan.expected.where)
        proofs.append(verify(*parts_of(plan.checkpoint, model), read_safetensors(folder), model, merge.form.dtype))

    write_merge(plan, target, merge, advance, prove)
    return proofs[0]


def parts_of(checkpoint: SourceCheckpoint, model: MegatronModel) -> tuple[ParallelGrid, Parts]:
    """The parts of a grid, or of Megatron's distributed format as a grid of one."""
    if checkpoint.kind is CheckpointKind.megatron:
        return read_parts(checkpoint.folder)
    part = distributed_part(read_distributed(checkpoint.folder), model, str(checkpoint.folder))
    return ParallelGrid(), {(0, 0, 0): part}


def refuse_other_sources(checkpoint: SourceCheckpoint) -> None:
    """`from-mcore` takes Megatron's formats, and says what else a folder is."""
    is_theirs = checkpoint.kind is CheckpointKind.megatron or (
        checkpoint.kind is CheckpointKind.distributed and is_megatron(read_distributed(checkpoint.folder))
    )
    if not is_theirs:
        raise ConfigError(
            f"{checkpoint.folder} is {checkpoint.kind.value}, not Megatron's: use `turnwise weights merge`"
        )
