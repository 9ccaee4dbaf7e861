"""LoRA on a transformers model by peft: factors beside every linear layer of the decoder, the rest frozen."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from turnwise.engines.model.policy_model import Gather, keep_tensor
from turnwise.engines.model.tensor_file import write_tensors
from turnwise.engines.model.transformers.model import TransformersModel
from turnwise.engines.model.transformers.recurrent_layers import LAYER, RecurrentLayer
from turnwise.engines.model.vision_model import VisionModel
from turnwise.errors import EngineError

try:
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer, ParamWrapper
except ModuleNotFoundError as error:
    raise EngineError('LoRA on this model needs peft: pip install "turnwise[lora]"') from error

ADAPTER = "default"
TAKEN_WHOLE = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Families of which peft refuses factors beside `out_proj`."""


class PeftModel(TransformersModel):
    """A transformers model whose own weights are frozen; each linear layer but the head adds `scale * B A x`.

    The weights are those of `base`, not a copy: peft puts its layers into the model itself. The experts of a layer,
    which lie in one parameter, have factors each; routers have none, nor have the dense layers beside experts where
    peft takes their names for those of experts.
    """

    has_adapter = True

    def __init__(self, base: TransformersModel, *, rank: int, alpha: float, seed: int) -> None:
        if rank < 1 or not alpha > 0.0:
            raise EngineError(f"LoRA needs a positive rank and alpha, found {rank} and {alpha}")
        nn.Module.__init__(self)
        self._take_over(base)
        self.rank, self.alpha = rank, alpha
        linear, experts = _targets(self.model, self._decoder)
        self._config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            target_modules=linear,
            target_parameters=experts or None,
        )
        with torch.random.fork_rng(), warnings.catch_warnings():
            # peft draws first values of its own, which are replaced, and says aloud that a Conv1D lies transposed.
            warnings.simplefilter("ignore")
            inject_adapter_in_model(self._config, self.model, ADAPTER)
        noise = torch.Generator().manual_seed(seed)
        for _, layer in self._adapted():
            a, b = _factors(layer)
            first = torch.empty(a.shape).uniform_(-(a.shape[1] ** -0.5), a.shape[1] ** -0.5, generator=noise)
            # Beside weights without numbers there are factors with numbers: nobody reads them from a file.
            device = torch.device("cpu") if a.is_meta else a.device
            layer.lora_A[ADAPTER].weight = nn.Parameter(first.to(device))
            layer.lora_B[ADAPTER].weight = nn.Parameter(torch.zeros(b.shape, device=device))
        self._adapters = {_plain(f"{name}.{_parameter(layer)}"): layer for name, layer in self._adapted()}
        self.facts["lora"] = {"rank": rank, "alpha": alpha, "targets": sorted(self._adapters)}
        self.eval()

    def _adapted(self) -> Iterator[tuple[str, LoraLayer]]:
        return ((name, module) for name, module in self.model.named_modules() if isinstance(module, LoraLayer))

    def _tensors(self) -> dict[str, Tensor]:
        """The frozen weights under the names they had before the adapter."""
        own = self.model.state_dict()
        return {_plain(name): own[name] for name in own if ".lora_" not in name}

    def _merge(self, name: str, tensor: Tensor, gather: Gather) -> Tensor:
        layer, base = self._adapters.get(name), gather(tensor)
        if layer is None:
            return base
        with _whole_factors(layer, gather):
            added: Tensor = layer.get_delta_weight(ADAPTER)
        return (base.float() + added).to(base.dtype)

    @torch.no_grad()
    def weights(self, gather: Gather = keep_tensor) -> Iterator[tuple[str, Tensor]]:
        yield from self._names.outward(self._tensors(), lambda name, tensor: self._merge(name, tensor, gather))

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        layers = [layer for _, layer in self._adapted()]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def adapter_weights(self, gather: Gather = keep_tensor) -> dict[str, Tensor]:
        theirs: dict[str, Tensor] = {}
        for name, layer in self._adapted():
            for kind, factor in zip("AB", _factors(layer), strict=True):
                theirs[f"base_model.model.{name}.lora_{kind}.weight"] = gather(factor.detach())
        return theirs

    def save_adapter(self, folder: Path, base_model: str, factors: Mapping[str, Tensor] | None = None) -> None:
        """The factors as peft writes them; `base_model` is the folder or hub id it should put them on."""
        self._config.base_model_name_or_path, self._config.inference_mode = base_model, True
        write_tensors(folder / "adapter_model.safetensors", factors or self.adapter_weights(), {"format": "pt"})
        self._config.save_pretrained(str(folder))


class PeftVisionModel(PeftModel, VisionModel):
    """The same of a model that sees: its decoder is adapted, tower and projector are not."""


def _targets(model: PreTrainedModel, decoder: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Linear layers of the decoder, and parameters that hold the matrices of many experts. Where peft says so the
    projections out of recurrent layers are left out, whose fused kernels take the weight by itself."""
    head, inside, weights = model.get_output_embeddings(), {*decoder.modules()}, {*decoder.parameters()}
    if model.config.model_type in TAKEN_WHOLE:
        recurrent = (module for module in decoder.modules() if isinstance(getattr(module, LAYER, None), RecurrentLayer))
        inside -= {module.out_proj for module in recurrent}
    linear = [
        name for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and module in inside
    ]  # fmt: skip
    return linear, [name for name, p in model.named_parameters() if p.dim() == 3 and "expert" in name and p in weights]


def _plain(name: str) -> str:
    """A name as it was before peft wrapped its module, perhaps twice."""
    return name.replace(".base_layer", "")


def _parameter(layer: LoraLayer) -> str:
    return layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"


def _factors(layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter]:
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


@contextmanager
def _whole_factors(layer: LoraLayer, gather: Gather) -> Iterator[None]:
    """Inside, peft's own arithmetic sees all of the factors."""
    homes = [(module, module.weight) for module in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER])]
    own = [weight.detach() for _, weight in homes]
    factors = [gather(factor) for factor in own]
    if all(new is factor for new, factor in zip(factors, own, strict=True)):
        yield
        return
    for (module, _), new in zip(homes, factors, strict=True):
        module._parameters["weight"] = nn.Parameter(new, requires_grad=False)
    try:
        yield
    finally:
        for module, weight in homes:
            module._parameters["weight"] = weight
