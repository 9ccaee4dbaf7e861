"""Our own decoder of the Llama family, shared by the sampler and the learner; the caller supplies attention."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from turnwise.engines.model import huggingface_folder
from turnwise.engines.model.batch_invariant import in_whole_rows
from turnwise.engines.model.checkpoint_rows import CheckpointRows, OwnRows, fill_decoder
from turnwise.engines.model.huggingface_folder import DecoderConfig, Fused, RopeConfig
from turnwise.engines.model.policy_model import (
    Attend,
    Gather,
    LayerCache,
    Mixing,
    ModelInputs,
    ModelShape,
    PolicyModel,
    keep_tensor,
    layers_recomputed,
)
from turnwise.engines.model.tensor_file import write_tensors
from turnwise.engines.model.token_logprobs import token_scores
from turnwise.errors import EngineError

ROPE_CHUNK = 1024
PLAIN = Mixing()
PROJECTIONS = ("qkv", "output", "gate_up", "down")


class Layer(nn.Module):
    """One layer with its weights fused: query, key and value in one matrix, gate and up in another."""

    attention_norm: nn.Parameter
    qkv: nn.Parameter
    qkv_bias: nn.Parameter | None
    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    output: nn.Parameter
    output_bias: nn.Parameter | None
    mlp_norm: nn.Parameter
    gate_up: nn.Parameter
    gate_up_bias: None
    down: nn.Parameter
    down_bias: None
    eps: Tensor

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.packed: dict[str, Tensor] | None = None
        """The matrices laid out for a sampler, by name; see `Decoder.pack_products`."""
        for name in ("qkv_bias", "q_norm", "k_norm", "output_bias", "gate_up_bias", "down_bias"):
            self.register_parameter(name, None)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None) -> Tensor:
        """Attention and SwiGLU over x [T, H]; past the attention only `rows` go on."""
        c = self.config
        fused = self.linear("qkv", rms_norm(x, self.attention_norm, self.eps))
        heads = fused.view(len(x), -1, c.head_dim)
        # Split, not sliced: the gradient of a slice is a whole tensor of zeros with the slice in it.
        rotated, v = torch.split(heads, [c.num_heads + c.num_kv_heads, c.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            # Queries and keys take every step together: at a few rows, calls cost more than sums.
            weights = (self.q_norm.expand(c.num_heads, -1), self.k_norm.expand(c.num_kv_heads, -1))
            rotated = rms_norm(rotated, torch.cat(weights), self.eps)
        q, k = torch.split(rotate(rotated, cos, sin), [c.num_heads, c.num_kv_heads], dim=1)
        mixed = attend(self.index, q, k, v, PLAIN)
        if rows is not None:  # past the last attention nobody looks at the others any more
            x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
        x = x + self.linear("output", mixed)
        gate, up = self.linear("gate_up", rms_norm(x, self.mlp_norm, self.eps)).chunk(2, dim=-1)
        return x + self.linear("down", self.activated(gate) * up)

    def activated(self, gate: Tensor) -> Tensor:
        """SiLU of the gate [T, I]; without a gradient, where bits are promised, no thread count changes them."""
        if torch.is_grad_enabled() or self.packed is not None:
            return functional.silu(gate)
        return in_whole_rows(functional.silu, gate)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """One of the four projections; an adapter may add to it."""
        if self.packed is not None:
            return packed_linear(x, self.packed[name], getattr(self, name + "_bias"))
        return functional.linear(x, getattr(self, name), getattr(self, name + "_bias"))


class Decoder(PolicyModel):
    """The native policy model: RMSNorm, rotary positions, grouped-query attention and SwiGLU."""

    embed: nn.Parameter
    norm: nn.Parameter
    head: nn.Parameter | None
    eps: Tensor
    layer_class: type[Layer] = Layer

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.facts = {"decoder": asdict(config), "lora": None}
        cache = LayerCache(config.num_kv_heads, config.head_dim, config.head_dim)
        self.shape = ModelShape(
            config.vocab_size, config.hidden_size, config.context_length, (cache,) * config.num_layers
        )
        self.layers = nn.ModuleList(self.layer_class(config, index) for index in range(config.num_layers))
        self.register_parameter("head", None)
        for part in huggingface_folder.layout(config):
            owner, _, name = part.name.rpartition(".")
            self.get_submodule(owner).register_parameter(name, nn.Parameter(tensors[part.name]))
        wide = torch.promote_types(self.embed.dtype, torch.float32)
        for owner in (self, *self.layers):
            device = None if self.embed.is_meta else self.embed.device
            eps = torch.tensor(config.norm_eps, dtype=wide, device=device)
            owner.register_buffer("eps", eps, persistent=False)
        self._rope: tuple[Tensor, Tensor] | None = None
        self._packed_head: Tensor | None = None

    @classmethod
    def read(cls, folder: Path, dtype: torch.dtype = torch.float32) -> "Decoder":
        """The model of a Hugging Face folder."""
        config = huggingface_folder.read_config(folder)
        return cls(config, huggingface_folder.read_tensors(folder, config, dtype))

    @classmethod
    def skeleton(cls, folder: Path, dtype: torch.dtype = torch.float32) -> "Decoder":
        """The same without numbers, on the meta device: `fill` reads them."""
        config = huggingface_folder.read_config(folder)
        huggingface_folder.check_weights(folder, config.num_layers, config)
        parts = huggingface_folder.layout(config)
        return cls(config, {part.name: torch.empty(part.shape, dtype=dtype, device="meta") for part in parts})

    @classmethod
    def fresh(cls, config: DecoderConfig, seed: int, dtype: torch.dtype = torch.float32) -> "Decoder":
        """Random weights: normal with deviation 0.02, norms one, biases zero."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, Tensor] = {}
        for part in huggingface_folder.layout(config):
            if part.columns is not None:
                tensors[part.name] = torch.empty(part.shape).normal_(0.0, 0.02, generator=generator).to(dtype)
            else:
                tensors[part.name] = torch.full(part.shape, 0.0 if "bias" in part.name else 1.0, dtype=dtype)
        return cls(config, tensors)

    def forward(self, inputs: ModelInputs, attend: Attend, *, rows: Tensor | None = None, recompute: int = 0) -> Tensor:
        cos, sin = self.rotations(inputs.positions)
        x = functional.embedding(inputs.tokens, self.embed)
        again = layers_recomputed(recompute, len(self.layers))
        for index, layer in enumerate(self.layers):
            wanted = rows if index == len(self.layers) - 1 else None
            if index < again:
                x = checkpoint(layer, x, cos, sin, attend, wanted, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin, attend, wanted)
        return rms_norm(x, self.norm, self.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        if self._packed_head is not None:
            return packed_linear(hidden, self._packed_head, None).float()
        return functional.linear(hidden, self.unembed).float()

    def scores(self, hidden: Tensor, targets: Tensor, *, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
        return token_scores(hidden, self.unembed, targets, temperature=temperature, chunk=chunk)

    def weights(self, gather: Gather = keep_tensor) -> Iterator[tuple[str, Tensor]]:
        for part in huggingface_folder.layout(self.config):
            yield from _pieces(part, self._tensor(part, gather))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        places = dict(_split(self.config, {name: self.get_parameter(name).detach() for name in self._names()}))
        for name, tensor in weights:
            target = places.pop(name, None)
            if target is None or target.shape != tensor.shape:
                actual = "no weight" if target is None else f"not {tuple(tensor.shape)} but {tuple(target.shape)}"
                raise EngineError(f"these are not the weights of this decoder: {name} is {actual} here")
            if not _same_memory(target, tensor):  # a learner and its sampler may share their weights
                target.copy_(tensor)
        if places:
            raise EngineError(f"these are not the weights of this decoder: {', '.join(sorted(places)[:5])} are missing")
        if self._packed_head is not None and not self.pack_products():
            raise EngineError("the new weights cannot be laid out as the old ones were")

    def fill(self, checkpoint: CheckpointRows, own_rows: OwnRows) -> None:
        fill_decoder(self.config, checkpoint, self.get_parameter, own_rows)

    def pack_products(self) -> bool:
        """Lay the matrices out for fast products without gradient, beside the plain ones; False where torch cannot.

        For a sampler that need not round as a learner does. `load` lays new weights out again.
        """
        layers = [cast(Layer, layer) for layer in self.layers]
        packed = [{name: pack(getattr(layer, name)) for name in PROJECTIONS} for layer in layers]
        head = pack(self.unembed)
        if head is None or any(matrix is None for matrices in packed for matrix in matrices.values()):
            return False
        for layer, matrices in zip(layers, packed, strict=True):
            layer.packed = {name: matrix for name, matrix in matrices.items() if matrix is not None}
        self._packed_head = head
        return True

    def without_adapter(self) -> AbstractContextManager[None]:
        raise EngineError("this model has no adapter to leave out")

    def save(self, folder: Path) -> None:
        write_tensors(folder / "model.safetensors", dict(self.weights()), {"format": "pt"})
        self.save_config(folder)

    def save_config(self, folder: Path) -> None:
        huggingface_folder.write_config(folder, self.config, self.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The weights as they lie here, fused and by our own names; live and without gradient."""
        return {part.name: self._tensor(part, keep_tensor) for part in huggingface_folder.layout(self.config)}

    def _tensor(self, part: Fused, gather: Gather) -> Tensor:
        """The fused parameter of this name, gathered by `gather` where it is shared out."""
        return gather(self.get_parameter(part.name).detach())

    def _names(self) -> Iterator[str]:
        return (part.name for part in huggingface_folder.layout(self.config))

    @property
    def dtype(self) -> torch.dtype:
        """Number format of weights and activations."""
        return self.embed.dtype

    @property
    def unembed(self) -> nn.Parameter:
        """The matrix [V, H] that makes logits."""
        return self.embed if self.head is None else self.head

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D] from a table that grows in whole chunks, so that a position's row never changes.

        `sin` is negated in its first half: pairs (i, i + D/2) then rotate as x * cos + x.roll(D/2) * sin.
        """
        needed = int(positions.max()) + 1
        if self._rope is None or len(self._rope[0]) < needed or self._rope[0].device != positions.device:
            rows = -(-needed // ROPE_CHUNK) * ROPE_CHUNK
            with torch.inference_mode(False):  # a sampler may build it first, a learner needs it in its graph
                self._rope = _rope_table(self.config.rope, self.config.head_dim, rows, positions.device, self.dtype)
        cos, sin = self._rope
        return cos.index_select(0, positions).unsqueeze(1), sin.index_select(0, positions).unsqueeze(1)


def _split(config: DecoderConfig, fused: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Views of our fused matrices under their Hugging Face names."""
    for part in huggingface_folder.layout(config):
        yield from _pieces(part, fused[part.name])


def _pieces(part: Fused, fused: Tensor) -> Iterator[tuple[str, Tensor]]:
    pieces = torch.split(fused, [rows for _, rows in part.sources])
    return zip((name for name, _ in part.sources), pieces, strict=True)


def _same_memory(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are the same numbers at the same place."""
    return (first.device, first.dtype, first.data_ptr(), first.stride()) == (
        other.device,
        other.dtype,
        other.data_ptr(),
        other.stride(),
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x [T, H, D] turned by the angles of `Decoder.rotations`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x over its root mean square, times the weight."""
    if torch.is_grad_enabled():
        return cast(Tensor, cast(Any, _RmsNorm).apply(x, weight, eps))
    return (x * _rms_scale(x, eps)).to(x.dtype) * weight


def _rms_scale(x: Tensor, eps: Tensor) -> Tensor:
    """1 / root mean square of each row, in float32 at least; a norm is one pass where a mean of squares is three."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=eps.dtype)
    return torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt()


class _RmsNorm(torch.autograd.Function):
    """The same norm with half the passes of the derived gradient, and nothing kept but its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        scale = _rms_scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        scaled = (x * scale).to(x.dtype)
        to_weight = (gradients[0] * scaled).sum_to_size(weight.shape) if ctx.needs_input_grad[1] else None
        # With n = x * scale: d x = scale * (g - n * mean(g * n)), where g is the gradient of n.
        g = gradients[0] * weight
        share = torch.linalg.vecdot(g, scaled.to(g.dtype)).unsqueeze(-1).div_(x.shape[-1])
        return torch.addcmul(g, scaled, share, value=-1.0).mul_(scale).to(x.dtype), to_weight, None


def _rope_table(
    rope: RopeConfig, head_dim: int, rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    cos, sin = rope_angles(rope, head_dim, rows)
    wide_cos, wide_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return wide_cos.to(device, dtype), wide_sin.to(device, dtype)


def rope_angles(rope: RopeConfig, head_dim: int, rows: int) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, D/2] in float32, made on the CPU so that every device turns by the same angles."""
    angles = torch.outer(torch.arange(rows, dtype=torch.float32), _frequencies(rope, head_dim))
    # Every chunk of the table by itself, so that no row of it depends on how many follow.
    chunks = torch.split(angles, ROPE_CHUNK)
    cos, sin = (torch.cat([in_whole_rows(turn, chunk) for chunk in chunks]) for turn in (torch.cos, torch.sin))
    return cos, sin


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each of the D/2 pairs."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.llama3 is None:
        return plain / rope.factor
    # Slow waves are stretched by the factor, fast ones kept, those between blended by how often they turn.
    low, high = rope.llama3.low_freq_factor, rope.llama3.high_freq_factor
    turns = rope.llama3.original_context * plain / (2 * torch.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


ROWS = 16
"""The number of rows the layout is made for; others work as well."""
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""How far a product may be from the plain one, as a share of its largest number."""


def pack(weight: Tensor) -> Tensor | None:
    """The weight [out, in] in a layout for `packed_linear`; None where this torch or this number format has none.

    The operators are those that torch's own compiler takes; they are tried out, since nothing documents them.
    """
    ops = torch.ops.mkldnn
    has_ops = hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")
    if not has_ops or weight.dtype not in CLOSE:
        return None
    try:
        packed: Tensor = ops._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        x = torch.linspace(-1.0, 1.0, 2 * weight.shape[1], dtype=torch.float32).view(2, -1).to(weight.dtype)
        product, plain = packed_linear(x, packed, None), functional.linear(x, weight.detach())
    except (RuntimeError, NotImplementedError, TypeError):  # not built for this processor
        return None
    off = (product.float() - plain.float()).abs().max()
    return packed if off <= CLOSE[weight.dtype] * plain.float().abs().max().clamp(min=1e-6) else None


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in] times a packed weight, plus the bias; without gradient."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
