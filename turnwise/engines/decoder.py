"""Our own decoder of the Llama family, shared by the sampler and the learner; the caller supplies attention."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from turnwise.engines import checkpoint_format
from turnwise.engines.checkpoint_format import DecoderConfig, RopeConfig
from turnwise.errors import EngineError

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq * D]."""

ROPE_CHUNK = 1024


class Layer(nn.Module):
    """The weights of one layer, fused: query, key and value in one matrix, gate and up in another."""

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

    def __init__(self) -> None:
        super().__init__()
        for name in ("qkv_bias", "q_norm", "k_norm", "output_bias", "gate_up_bias", "down_bias"):
            self.register_parameter(name, None)


class Decoder(nn.Module):
    """RMSNorm, rotary positions, grouped-query attention and SwiGLU over a flat list of tokens.

    There is no batch dimension: `token_ids[T]` may be one sequence, many packed ones or one token of each of many,
    because only `attend` knows which tokens see which.
    """

    embed: nn.Parameter
    norm: nn.Parameter
    head: nn.Parameter | None
    eps: Tensor

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer() for _ in range(config.num_layers))
        self.register_parameter("head", None)
        for part in checkpoint_format.layout(config):
            owner, _, name = part.name.rpartition(".")
            self.get_submodule(owner).register_parameter(name, nn.Parameter(tensors[part.name]))
        wide = torch.promote_types(self.embed.dtype, torch.float32)
        eps = torch.tensor(config.norm_eps, dtype=wide, device=self.embed.device)
        self.register_buffer("eps", eps, persistent=False)
        self._rope: tuple[Tensor, Tensor] | None = None

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> "Decoder":
        """The model of a Hugging Face folder."""
        config = checkpoint_format.read_config(folder)
        return cls(config, checkpoint_format.read_tensors(folder, config, dtype))

    @classmethod
    def fresh(cls, config: DecoderConfig, seed: int, dtype: torch.dtype = torch.float32) -> "Decoder":
        """Random weights: normal with deviation 0.02, norms one, biases zero."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, Tensor] = {}
        for part in checkpoint_format.layout(config):
            if part.columns is not None:
                tensors[part.name] = torch.empty(part.shape).normal_(0.0, 0.02, generator=generator).to(dtype)
            else:
                tensors[part.name] = torch.full(part.shape, 0.0 if "bias" in part.name else 1.0, dtype=dtype)
        return cls(config, tensors)

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face folder (config.json, model.safetensors)."""
        checkpoint_format.write_folder(folder, self.config, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """The weights by our names, live and without gradient."""
        return {part.name: self.get_parameter(part.name).detach() for part in checkpoint_format.layout(self.config)}

    def replace_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in other weights, all of them or, when a name or shape does not fit, none."""
        mine = self.tensors()
        wrong = sorted(tensors.keys() ^ mine.keys())
        wrong = wrong or [name for name in mine if tensors[name].shape != mine[name].shape]
        if wrong:
            raise EngineError(f"these are not the weights of this decoder: {', '.join(wrong[:5])}")
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])

    @property
    def dtype(self) -> torch.dtype:
        """Number format of weights and activations."""
        return self.embed.dtype

    @property
    def unembed(self) -> nn.Parameter:
        """The matrix [V, H] that makes logits."""
        return self.embed if self.head is None else self.head

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        rows: Tensor | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Hidden states [T, H] after the final norm, or those of some rows only.

        `recompute` keeps just the input of each layer for backward, which runs the layer again.
        """
        cos, sin = self._rotations(positions)
        x = functional.embedding(token_ids, self.embed)
        for index, layer in enumerate(self.layers):
            wanted = rows if index == len(self.layers) - 1 else None
            inputs = (cast(Layer, layer), index, x, cos, sin, attend, wanted)
            if recompute:
                x = checkpoint(self._block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self._block(*inputs)
        return self._rms_norm(x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [T, V] in float32."""
        return functional.linear(hidden, self.unembed).float()

    def _block(
        self, layer: Layer, index: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        c = self.config
        fused = self._linear(layer, "qkv", self._rms_norm(x, layer.attention_norm))
        heads = fused.view(len(x), -1, c.head_dim)
        # Split, not sliced: the gradient of a slice is a whole tensor of zeros with the slice in it.
        rotated, v = torch.split(heads, [c.num_heads + c.num_kv_heads, c.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            # Queries and keys take every step together: at a few rows, calls cost more than sums.
            weights = (layer.q_norm.expand(c.num_heads, -1), layer.k_norm.expand(c.num_kv_heads, -1))
            rotated = self._rms_norm(rotated, torch.cat(weights))
        rotated = torch.addcmul(rotated * cos, rotated.roll(c.head_dim // 2, -1), sin)
        q, k = torch.split(rotated, [c.num_heads, c.num_kv_heads], dim=1)
        mixed = attend(index, q, k, v)
        if rows is not None:  # past the last attention nobody looks at the others any more
            x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
        x = x + self._linear(layer, "output", mixed)
        gate, up = self._linear(layer, "gate_up", self._rms_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
        return x + self._linear(layer, "down", functional.silu(gate) * up)

    def _linear(self, layer: Layer, name: str, x: Tensor) -> Tensor:
        """One of the four projections of a layer; an adapter may add to it."""
        return functional.linear(x, getattr(layer, name), getattr(layer, name + "_bias"))

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return cast(Tensor, cast(Any, _RmsNorm).apply(x, weight, self.eps))
        return (x * _rms_scale(x, self.eps)).to(x.dtype) * weight

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
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
    angles = torch.outer(torch.arange(rows, dtype=torch.float32), _frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    wide_cos, wide_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return wide_cos.to(device, dtype), wide_sin.to(device, dtype)


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
