"""LoRA on our fused matrices: small trained factors beside frozen weights, saved in peft's format."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from turnwise.engines.model import huggingface_folder
from turnwise.engines.model.decoder import Decoder, Layer
from turnwise.engines.model.huggingface_folder import Fused
from turnwise.engines.model.policy_model import Gather, keep_tensor
from turnwise.engines.model.tensor_file import write_tensors
from turnwise.errors import EngineError
from turnwise.errors.nearest_name import unknown
from turnwise.system.files import replacing

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLayer(Layer):
    """A layer whose projections have factors beside them; `adapted` switches them off for a while."""

    rows: dict[str, dict[str, int]]
    """The rows of each projection in a fused matrix: `{"gate_up": {"gate_proj": 384, "up_proj": 384}}`."""
    scale: float
    adapted: bool = True

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = super().linear(name, x)
        if name not in self.rows or not self.adapted:
            return out
        added: list[Tensor] = []
        for projection, rows in self.rows[name].items():
            if hasattr(self, projection + "_A"):
                a, b = _factors(self, projection)
                added.append(functional.linear(functional.linear(x, a), b))
            else:
                added.append(out.new_zeros(len(x), rows))
        return out + self.scale * (added[0] if len(added) == 1 else torch.cat(added, dim=-1))


class LoraDecoder(Decoder):
    """A decoder whose own weights are frozen; each target adds `scale * B A x`, with B zero at the start.

    The weights are those of `base`, not a copy. A fused matrix has one pair of factors per projection, A [rank, in] and
    B [out, rank], as `layers.0.q_proj_A` and `layers.0.q_proj_B`.
    """

    layer_class = LoraLayer
    has_adapter = True

    def __init__(
        self, base: Decoder, *, rank: int, alpha: float, seed: int, targets: tuple[str, ...] = TARGETS
    ) -> None:
        if rank < 1 or not alpha > 0.0:
            raise EngineError(f"LoRA needs a positive rank and alpha, found {rank} and {alpha}")
        if not targets:
            raise EngineError(f"LoRA needs targets, some of {', '.join(TARGETS)}")
        for target in targets:
            if target not in TARGETS:
                raise EngineError(unknown("LoRA target", target, TARGETS))
        super().__init__(base.config, base.tensors())
        self.requires_grad_(False)
        self.rank, self.alpha, self.targets = rank, alpha, targets
        self.facts["lora"] = {"rank": rank, "alpha": alpha, "targets": list(targets)}
        rows: dict[str, dict[str, int]] = {}
        noise = torch.Generator().manual_seed(seed)
        for part in self._adapted():
            owner, _, fused = part.name.rpartition(".")
            layer = self.get_submodule(owner)
            rows[fused] = {_projection(source): count for source, count in part.sources}
            for name, count in rows[fused].items():
                if name in targets:
                    bound = part.shape[1] ** -0.5
                    a = torch.empty(rank, part.shape[1]).uniform_(-bound, bound, generator=noise)
                    layer.register_parameter(name + "_A", nn.Parameter(a))
                    layer.register_parameter(name + "_B", nn.Parameter(torch.zeros(count, rank)))
        for layer in self._lora_layers():
            layer.rows, layer.scale = rows, self.scale

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / self.rank

    def _lora_layers(self) -> Iterator[LoraLayer]:
        return (layer for layer in self.layers if isinstance(layer, LoraLayer))

    def _adapted(self) -> Iterator[Fused]:
        """The fused matrices of which some projection is a target."""
        for part in huggingface_folder.layout(self.config):
            if self._is_adapted(part):
                yield part

    def _is_adapted(self, part: Fused) -> bool:
        return part.columns is not None and any(_projection(name) in self.targets for name, _ in part.sources)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        for layer in self._lora_layers():
            layer.adapted = False
        try:
            yield
        finally:
            for layer in self._lora_layers():
                layer.adapted = True

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: (rows, *part.shape[1:])
            for part in huggingface_folder.layout(self.config)
            for name, rows in part.sources
        }

    def base(self) -> dict[str, Tensor]:
        """The frozen weights by our names."""
        return {name: self.get_parameter(name).detach() for name in self._names()}

    @torch.no_grad()
    def _tensor(self, part: Fused, gather: Gather) -> Tensor:
        """The factors' products added: what a sampler needs."""
        base = super()._tensor(part, gather)
        if not self._is_adapted(part):
            return base
        layer = self.get_submodule(part.name.rpartition(".")[0])
        wide = base.float().clone()
        pieces = torch.split(wide, [rows for _, rows in part.sources])
        for (source, _), rows in zip(part.sources, pieces, strict=True):
            if _projection(source) in self.targets:
                a, b = (gather(factor.detach()) for factor in _factors(layer, _projection(source)))
                rows.add_(b @ a, alpha=self.scale)
        return wide.to(base.dtype)

    def adapter_weights(self, gather: Gather = keep_tensor) -> dict[str, Tensor]:
        theirs: dict[str, Tensor] = {}
        for part in self._adapted():
            layer = self.get_submodule(part.name.rpartition(".")[0])
            for source, _ in part.sources:
                if _projection(source) in self.targets:
                    for kind, factor in zip("AB", _factors(layer, _projection(source)), strict=True):
                        name = f"base_model.model.{source.removesuffix('.weight')}.lora_{kind}.weight"
                        theirs[name] = gather(factor.detach())
        return theirs

    def save_adapter(self, folder: Path, base_model: str, factors: Mapping[str, Tensor] | None = None) -> None:
        """The factors as peft writes them; `base_model` is the folder or hub id it should put them on."""
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": sorted(self.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "inference_mode": True,
        }
        write_tensors(folder / "adapter_model.safetensors", factors or self.adapter_weights(), {"format": "pt"})
        with replacing(folder / "adapter_config.json") as file:
            file.write((json.dumps(config, indent=2) + "\n").encode())


def _projection(source: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return source.split(".")[-2]


def _factors(layer: nn.Module, projection: str) -> tuple[nn.Parameter, nn.Parameter]:
    return layer.get_parameter(projection + "_A"), layer.get_parameter(projection + "_B")
