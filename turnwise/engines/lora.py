"""LoRA on our fused matrices: small trained factors beside frozen weights, saved in peft's format."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from turnwise.engines import checkpoint_format
from turnwise.engines.checkpoint_format import Fused
from turnwise.engines.decoder import Decoder, Layer
from turnwise.errors import EngineError, unknown

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Which matrices get factors, and of which rank; their product counts `alpha / rank`."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0.0:
            raise EngineError(f"LoRA needs a positive rank and alpha, found {self.rank} and {self.alpha}")
        if not self.targets:
            raise EngineError(f"LoRA needs targets, some of {', '.join(TARGETS)}")
        for target in self.targets:
            if target not in TARGETS:
                raise EngineError(unknown("LoRA target", target, TARGETS))

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / self.rank


class LoraDecoder(Decoder):
    """A decoder whose own weights are frozen; each target adds `scale * B A x`, with B zero at the start.

    The weights are those of `base`, not a copy. A fused matrix has one pair of factors per projection, A [rank, in] and
    B [out, rank], as `layers.0.q_proj_A` and `layers.0.q_proj_B`.
    """

    def __init__(self, base: Decoder, settings: LoraSettings, seed: int) -> None:
        super().__init__(base.config, base.tensors())
        self.requires_grad_(False)
        self.settings = settings
        self._projections: dict[str, dict[str, int]] = {}
        """The rows of each projection in a fused matrix: `{"gate_up": {"gate_proj": 384, "up_proj": 384}}`."""
        noise = torch.Generator().manual_seed(seed)
        for part in self._adapted():
            owner, _, fused = part.name.rpartition(".")
            layer = self.get_submodule(owner)
            self._projections[fused] = {_projection(source): rows for source, rows in part.sources}
            for name, rows in self._projections[fused].items():
                if name in settings.targets:
                    bound = part.shape[1] ** -0.5
                    a = torch.empty(settings.rank, part.shape[1]).uniform_(-bound, bound, generator=noise)
                    layer.register_parameter(name + "_A", nn.Parameter(a))
                    layer.register_parameter(name + "_B", nn.Parameter(torch.zeros(rows, settings.rank)))

    def _adapted(self) -> Iterator[Fused]:
        """The fused matrices of which some projection is a target."""
        for part in checkpoint_format.layout(self.config):
            if part.columns is not None and any(_projection(name) in self.settings.targets for name, _ in part.sources):
                yield part

    def _linear(self, layer: Layer, name: str, x: Tensor) -> Tensor:
        out = super()._linear(layer, name, x)
        if name not in self._projections:
            return out
        added: list[Tensor] = []
        for projection, rows in self._projections[name].items():
            if projection in self.settings.targets:
                a, b = _factors(layer, projection)
                added.append(functional.linear(functional.linear(x, a), b))
            else:
                added.append(out.new_zeros(len(x), rows))
        return out + self.settings.scale * (added[0] if len(added) == 1 else torch.cat(added, dim=-1))

    def base(self) -> dict[str, Tensor]:
        """The frozen weights by our names."""
        return super().tensors()

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """All weights by our names, the factors' products added: what a sampler needs."""
        merged = self.base()
        for part in self._adapted():
            layer = self.get_submodule(part.name.rpartition(".")[0])
            wide = merged[part.name].float().clone()
            pieces = torch.split(wide, [rows for _, rows in part.sources])
            for (source, _), rows in zip(part.sources, pieces, strict=True):
                if _projection(source) in self.settings.targets:
                    a, b = _factors(layer, _projection(source))
                    rows.add_(b @ a, alpha=self.settings.scale)
            merged[part.name] = wide.to(merged[part.name].dtype)
        return merged

    def save_adapter(self, folder: Path, base_model: str) -> None:
        """The factors as peft writes them; `base_model` is the folder or hub id it should put them on."""
        folder.mkdir(parents=True, exist_ok=True)
        theirs: dict[str, Tensor] = {}
        for part in self._adapted():
            layer = self.get_submodule(part.name.rpartition(".")[0])
            for source, _ in part.sources:
                if _projection(source) in self.settings.targets:
                    for kind, factor in zip("AB", _factors(layer, _projection(source)), strict=True):
                        name = f"base_model.model.{source.removesuffix('.weight')}.lora_{kind}.weight"
                        theirs[name] = factor.detach().cpu().contiguous()
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.settings.rank,
            "lora_alpha": self.settings.alpha,
            "target_modules": sorted(self.settings.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "inference_mode": True,
        }
        weights = folder / "adapter_model.safetensors"
        save_file(theirs, weights.with_suffix(".partial"), metadata={"format": "pt"})
        os.replace(weights.with_suffix(".partial"), weights)
        partial = folder / "adapter_config.json.partial"
        partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, folder / "adapter_config.json")


def _projection(source: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return source.split(".")[-2]


def _factors(layer: nn.Module, projection: str) -> tuple[nn.Parameter, nn.Parameter]:
    return layer.get_parameter(projection + "_A"), layer.get_parameter(projection + "_B")
