"""The critic: a value head on its own copy of the policy's trunk, or on the trunk they share."""

import copy

import torch
from torch import Tensor, nn

from turnwise.engines.model.policy_model import PolicyModel
from turnwise.errors import EngineError


class Critic(nn.Module):
    """Predicts the return from the state before a token. The head starts at zero, so the first values are zero."""

    def __init__(self, hidden_size: int, trunk: PolicyModel | None) -> None:
        super().__init__()
        self.trunk = trunk
        """None when the policy's trunk is shared; its gradient then comes from both losses."""
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    @classmethod
    def copying(cls, model: PolicyModel) -> "Critic":
        """With its own trunk, which starts as the policy is now and of which the same weights are trained."""
        if model.has_adapter:
            raise EngineError("a critic copies the weights below an adapter: make it before the adapter is added")
        return cls(model.shape.hidden_size, copy.deepcopy(model).float())

    @classmethod
    def sharing(cls, model: PolicyModel) -> "Critic":
        """With nothing of its own but the head."""
        return cls(model.shape.hidden_size, None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N] of hidden states [N, H], in the head's own precision."""
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).squeeze(1)
        return values
