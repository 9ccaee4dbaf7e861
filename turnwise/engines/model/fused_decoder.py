"""The native model by fused kernels: for a GPU's sampler inside CUDA graphs, and for a learner with gradients."""

from collections.abc import Callable, Mapping
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from turnwise.engines.kernels.linear import invariant_linear, linear
from turnwise.engines.kernels.rows import Rotation, add_rms_norm, rotate, swiglu
from turnwise.engines.model.decoder import PLAIN, ROPE_CHUNK, Decoder, Layer, rope_angles
from turnwise.engines.model.fused_stack import LayerWeights, StackPass, run_stack
from turnwise.engines.model.huggingface_folder import DecoderConfig
from turnwise.engines.model.lora import LoraDecoder, LoraLayer
from turnwise.engines.model.policy_model import Attend, Mixing, ModelInputs, layers_recomputed
from turnwise.engines.model.token_logprobs import token_scores
from turnwise.errors import EngineError


@runtime_checkable
class FusedAttend(Protocol):
    """An `Attend` that can also turn queries and keys itself, on their way into its cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixing: Mixing, /) -> Tensor: ...

    def rotated(self, layer: int, fused: Tensor, rotation: Rotation) -> Tensor:
        """Attention [T, Hq * D] of a plain layer from its products [T, (Hq + 2 Hkv) * D], not rotated yet."""
        ...


Rotated = Callable[[int, Tensor, Rotation], Tensor]
"""What `FusedAttend.rotated` is."""


def _rotated_of(attend: Attend) -> Rotated:
    """Rotation and attention together, of an attention that may only know the latter."""
    if isinstance(attend, FusedAttend):
        return attend.rotated

    def rotated(layer: int, fused: Tensor, rotation: Rotation) -> Tensor:
        return attend(layer, *rotate(fused, rotation), PLAIN)

    return rotated


def rotation_of(
    c: DecoderConfig, cos: Tensor, sin: Tensor, positions: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
) -> Rotation:
    """How a layer of this shape turns queries and keys."""
    return Rotation(cos, sin, positions, q_norm, k_norm, c.norm_eps, c.num_heads, c.num_kv_heads, c.head_dim)


class FusedLayer(Layer):
    """A layer whose input and output are a pair: the stream, and what is still to be added to it.

    The addition is then part of the next norm, which reads and writes the stream anyway.
    """

    invariant: bool = False

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        added: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        attend: Attend,
        rotated: Rotated,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention and SwiGLU over x [T, H]; past the attention only `rows` go on."""
        c = self.config
        rotation = rotation_of(c, cos, sin, positions, self.q_norm, self.k_norm)
        y, x = add_rms_norm(x, added, self.attention_norm, c.norm_eps)
        mixed = rotated(self.index, self.linear("qkv", y), rotation)
        if rows is not None:  # past the last attention nobody looks at the others any more
            x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
        y, x = add_rms_norm(x, self.linear("output", mixed), self.mlp_norm, c.norm_eps)
        return x, self.linear("down", swiglu(self.linear("gate_up", y)))

    def plain_weights(self) -> LayerWeights | None:
        """The parameters, of a layer that is nothing more than they say: an adapter adds to products, a hook wants its
        module called."""
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks:
            return None
        return LayerWeights._make(self._parameters[name] for name in LayerWeights._fields)

    def linear(self, name: str, x: Tensor) -> Tensor:
        product = invariant_linear if self.invariant else linear
        return product(x, getattr(self, name), getattr(self, name + "_bias"))


class FusedDecoder(Decoder):
    """The native policy model of a GPU; on the CPU it computes the same with the kernels' references.

    `invariant` takes products and norms whose bits for a row depend on that row alone, so that a sampler and a learner
    with attention of the same kind get the same log-probs to the last bit. `prepare` must be called before `forward`
    on a GPU: nothing there may wait for the device to learn which positions come.
    """

    layer_class: type[Layer] = FusedLayer
    invariant: bool = False

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor]) -> None:
        super().__init__(config, tensors)
        self._tables: list[tuple[Tensor, Tensor]] = []
        """cos and sin, the last one in use; a CUDA graph that was captured with an earlier one still reads that."""

    @classmethod
    def of(
        cls, decoder: Decoder, *, device: torch.device, dtype: torch.dtype, invariant: bool = False
    ) -> "FusedDecoder":
        """The same model on a device and in a number format, an adapter too; shares what already is as wanted."""
        own = decoder.base() if isinstance(decoder, LoraDecoder) else decoder.tensors()
        fused = FusedDecoder(decoder.config, {name: tensor.to(device, dtype) for name, tensor in own.items()})
        fused._be_invariant(invariant)
        if not isinstance(decoder, LoraDecoder):
            return fused
        adapted = FusedLoraDecoder(fused, rank=decoder.rank, alpha=decoder.alpha, seed=0, targets=decoder.targets).move(
            device, dtype
        )
        adapted._be_invariant(invariant)
        factors: Mapping[str, Tensor] = dict(decoder.named_parameters())
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(factors[name])
        return adapted

    @classmethod
    def sharing(cls, other: "FusedDecoder") -> "FusedDecoder":
        """A second model over the same weights in memory, as `load` then notices; an adapter is merged into a copy."""
        twin = FusedDecoder(other.config, other.tensors())
        twin._be_invariant(other.invariant)
        return twin

    def _be_invariant(self, invariant: bool) -> None:
        self.invariant = invariant
        for layer in self.layers:
            cast(FusedLayer, layer).invariant = invariant

    def prepare(self, positions: int) -> None:
        device = self.embed.device
        length = len(self._tables[-1][0]) if self._tables else 0
        if positions <= length and self._tables[-1][0].device == device:
            return
        # At least twice as many as before: tables are kept for the graphs that hold them, and all must stay small.
        needed = max(positions, 2 * length)
        rows = -(-needed // ROPE_CHUNK) * ROPE_CHUNK
        with torch.inference_mode(False):  # a sampler may build it first, a learner needs it in its graph
            cos, sin = rope_angles(self.config.rope, self.config.head_dim, rows)
            self._tables.append((cos.to(device), sin.to(device)))

    def forward(self, inputs: ModelInputs, attend: Attend, *, rows: Tensor | None = None, recompute: int = 0) -> Tensor:
        positions = inputs.positions
        if positions.device.type == "cpu":
            self.prepare(int(positions.max()) + 1)
        if not self._tables or self._tables[-1][0].device != positions.device:
            raise EngineError("a fused decoder on a GPU must be told by `prepare` how many positions will come")
        cos, sin = self._tables[-1]
        x: Tensor = functional.embedding(inputs.tokens, self.embed)
        added: Tensor | None = None
        again = layers_recomputed(recompute, len(self.layers))
        if torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
            weights = [cast(FusedLayer, layer).plain_weights() for layer in self.layers]
            plain = [matrices for matrices in weights if matrices is not None]
            if len(plain) == len(weights):
                rotation = rotation_of(self.config, cos, sin, positions, None, None)
                return run_stack(x, plain, self.norm, StackPass(rotation, attend, self.invariant, rows, again))
        rotated = _rotated_of(attend)
        for index, layer in enumerate(self.layers):
            wanted = rows if index == len(self.layers) - 1 else None
            arguments = (x, added, cos, sin, positions, attend, rotated, wanted)
            if index < again:
                x, added = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x, added = layer(*arguments)
        y, _ = add_rms_norm(x, added, self.norm, self.config.norm_eps)
        return y

    def logits(self, hidden: Tensor) -> Tensor:
        product = invariant_linear if self.invariant else linear
        return product(hidden, self.unembed, None, torch.float32)

    def scores(self, hidden: Tensor, targets: Tensor, *, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
        return token_scores(
            hidden, self.unembed, targets, temperature=temperature, chunk=chunk, invariant=self.invariant
        )

    def pack_products(self) -> bool:
        """Never: the layout is for a CPU's products."""
        return False


class FusedLoraLayer(LoraLayer, FusedLayer):
    """A fused layer with factors beside its projections; those are plain products."""

    def plain_weights(self) -> LayerWeights | None:
        return None


class FusedLoraDecoder(LoraDecoder, FusedDecoder):
    """A fused decoder with an adapter; `FusedDecoder.of` makes it from one that is not fused."""

    layer_class = FusedLoraLayer
