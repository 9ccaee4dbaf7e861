"""The reference policy: frozen weights that KL is measured against, a copy or the base under an adapter."""

from collections.abc import Sequence

from torch import Tensor

from turnwise.engines.learners.forward_pass import ForwardPass
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.lora import LoraDecoder


class Reference:
    """Scores tokens under weights that no step changes."""

    def __init__(self, decoder: Decoder, forward: ForwardPass) -> None:
        self.decoder = decoder.requires_grad_(False)
        self._forward = forward

    @classmethod
    def of(cls, decoder: Decoder, forward: ForwardPass) -> "Reference":
        """The policy as it is now: with LoRA its base, which costs no memory, else a copy."""
        if isinstance(decoder, LoraDecoder):
            return cls(Decoder(decoder.config, decoder.base()), forward)
        copied = {name: tensor.clone() for name, tensor in decoder.tensors().items()}
        return cls(Decoder(decoder.config, copied).to(forward.device), forward)

    def logprobs(self, tokens: Tensor, lengths: Sequence[int], index: Tensor) -> Tensor:
        """Log-probs [N] of the tokens at `index`, on the CPU."""
        return self._forward.logprobs(self.decoder, self._forward.pack(tokens, lengths, index))
