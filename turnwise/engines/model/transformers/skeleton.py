"""A transformers model without numbers: on the meta device, but for what its config alone decides."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass


def empty_model(
    family: type[_BaseAutoModelClass],
    path: Path,
    dtype: torch.dtype,
    attention: Mapping[str, str],
    trust_remote_code: bool,
) -> PreTrainedModel:
    """The model that `from_pretrained` would fill from this folder."""
    trusted = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(path, local_files_only=True, **trusted)
    with torch.device("meta"):
        model: PreTrainedModel = family.from_config(config, dtype=dtype, **attention, **trusted)
    _make_buffers(model)
    return model.eval()


@torch.no_grad()
def _make_buffers(model: PreTrainedModel) -> None:
    """Those that no checkpoint holds, such as the frequencies of rotary positions, by the model's own code."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set & {name for name, _ in module.named_buffers(recurse=False)}:
            empty = torch.empty_like(module.get_buffer(name), device="cpu")
            module.register_buffer(name, empty, persistent=False)
        _begin(module)
    model.initialize_weights()  # what else it would make is on the meta device


def make_room(model: nn.Module) -> None:
    """Memory on the CPU for what has none, tied parameters once; without numbers."""
    made: dict[torch.Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
            module.register_parameter(name, made.get(parameter, parameter))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module.register_buffer(name, torch.empty_like(buffer, device="cpu"))


def _begin(module: nn.Module) -> None:
    """As if transformers had made nothing of it yet."""
    module.__dict__.pop("_is_hf_initialized", None)
