"""The weights a learner computes with: in bfloat16 on a GPU, with what float32 knows of them kept for the optimizer."""

import torch
from torch import Tensor

from turnwise.config import LearnerConfig
from turnwise.engines.devices import device_of
from turnwise.engines.learners.forward_pass import computes_narrow
from turnwise.engines.learners.gradients import is_narrow
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.errors import EngineError


def working_dtype(config: LearnerConfig, model: PolicyModel) -> torch.dtype:
    """The number format of what is trained; bfloat16 on a CPU and below an adapter is autocast's affair."""
    on_gpu = device_of(config.device) != "cpu"
    narrow = on_gpu and computes_narrow(config) and not model.has_adapter
    return torch.bfloat16 if narrow else torch.float32


def make_working(
    model: PolicyModel, device: torch.device, dtype: torch.dtype, *, invariant: bool
) -> tuple[PolicyModel, dict[str, Tensor]]:
    """The model as it computes there, and what is trained of it by name where it was given with more digits."""
    if dtype is torch.float32 and not (invariant and device.type == "cuda"):
        return model.to(device), {}
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    wide = {name: p.detach() for name, p in trained if p.dtype.itemsize > dtype.itemsize}
    if device.type == "cuda" and type(model) is Decoder:
        from turnwise.engines.model.fused_decoder import FusedDecoder  # Triton is there with CUDA only

        return FusedDecoder.of(model, device=device, dtype=dtype, invariant=invariant), wide
    return model.move(device, dtype), wide


def refuse_narrow(model: PolicyModel, *, working: torch.dtype, autocast: bool) -> None:
    """Small steps vanish in bfloat16: what is trained has float32 masters, or is wide itself.

    A frozen base may be narrow under autocast.
    """
    if working is not torch.float32:
        return
    for name, parameter in model.named_parameters():
        if is_narrow(parameter) and parameter.requires_grad:
            raise EngineError(f"{name} is {parameter.dtype}; load what is trained as float32")
        if is_narrow(parameter) and not autocast:
            raise EngineError(f"a base in {parameter.dtype} needs learner precision bfloat16")
