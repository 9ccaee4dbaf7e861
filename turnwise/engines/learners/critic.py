"""The critic: a value head on its own copy of the policy's trunk, or on the trunk they share."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from turnwise.engines.model.decoder import Decoder


class Critic(nn.Module):
    """Predicts the return from the state before a token. The head starts at zero, so the first values are zero."""

    def __init__(self, hidden_size: int, trunk: Decoder | None) -> None:
        super().__init__()
        self.trunk = trunk
        """None when the policy's trunk is shared; its gradient then comes from both losses."""
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    @classmethod
    def copying(cls, decoder: Decoder) -> "Critic":
        """With its own trunk, which starts as the policy is now; the unembedding stays behind."""
        config = replace(decoder.config, tied=True)
        tensors = {name: tensor.float().clone() for name, tensor in decoder.tensors().items() if name != "head"}
        return cls(config.hidden_size, Decoder(config, tensors))

    @classmethod
    def sharing(cls, decoder: Decoder) -> "Critic":
        """With nothing of its own but the head."""
        return cls(decoder.config.hidden_size, None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N] of hidden states [N, H], in the head's own precision."""
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).squeeze(1)
        return values
