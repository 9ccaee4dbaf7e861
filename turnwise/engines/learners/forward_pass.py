"""A decoder run over packed sequences: the states before chosen tokens, and the log-probs these tokens get."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.choices import Precision
from turnwise.engines.model import attention
from turnwise.engines.model.attention import pad_rows
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.policy_model import ModelInputs
from turnwise.engines.model.token_scores import token_logprobs
from turnwise.errors import EngineError

EXACT_CHUNK = 1024
"""Logits at once in exact mode; a multiple of every regime's row_pad."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Tokens [T] of several sequences, one after the other, and the places [N] of those to be scored."""

    tokens: Tensor
    lengths: Sequence[int]
    index: Tensor

    @property
    def targets(self) -> Tensor:
        """The tokens [N] to be scored."""
        return self.tokens[self.index]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Where and how a decoder runs: `ForwardPass(torch.device("cpu"), temperature=1.0)`.

    Nothing here needs a batch dimension or padding. `precision` None means bfloat16 products on CUDA and the weights'
    own format elsewhere.
    """

    device: torch.device
    temperature: float
    precision: Precision | None = None
    chunk_tokens: int = 1024
    """Logits are made for this many tokens at once."""
    recompute_layers: bool = False
    """Keep only what enters each layer and compute the rest again in backward."""
    regime: attention.Regime | None = None
    """The sampler's, for exact log-probs."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise EngineError(f"temperature must be 0 or more, found {self.temperature}")
        if self.chunk_tokens < 1:
            raise EngineError(f"chunk_tokens must be positive, found {self.chunk_tokens}")

    @property
    def narrow(self) -> bool:
        """Whether products are taken in bfloat16."""
        chosen = self.precision or (Precision.bfloat16 if self.device.type == "cuda" else Precision.float32)
        return chosen is Precision.bfloat16

    def pack(self, tokens: Tensor, lengths: Sequence[int], index: Tensor) -> Packed:
        """Checked and on the device. A token that opens a sequence has nothing before it that could predict it."""
        if tokens.dim() != 1 or index.dim() != 1 or sum(lengths) != len(tokens) or min(lengths, default=0) < 1:
            raise EngineError(f"{len(tokens)} tokens cannot be sequences of lengths {list(lengths)[:20]}")
        if len(index) == 0:
            raise EngineError("there is no token to score")
        if int(index.min()) < 0 or int(index.max()) >= len(tokens):
            raise EngineError(f"places {int(index.min())} to {int(index.max())} are outside {len(tokens)} tokens")
        if bool((index[1:] <= index[:-1]).any()):
            raise EngineError("the places of policy tokens must rise")
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        if bool(torch.isin(index.cpu(), starts).any()):
            raise EngineError("a sequence starts with a policy token: there is nothing to predict it from")
        return Packed(tokens.to(self.device), lengths, index.to(self.device))

    def autocast(self) -> AbstractContextManager[object]:
        """The number format of products inside."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.narrow else nullcontext()

    def hidden(self, decoder: Decoder, packed: Packed) -> Tensor:
        """The states [N, H] from which the chosen tokens are predicted."""
        places = attention.positions(packed.lengths).to(self.device)
        attend = attention.packed(packed.lengths, self.device)
        recompute = self.recompute_layers and torch.is_grad_enabled()
        states: Tensor = decoder(ModelInputs(packed.tokens, places), attend, rows=packed.index - 1, recompute=recompute)
        return states

    def scores(self, decoder: Decoder, packed: Packed, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] of the chosen tokens at the sampling temperature."""
        return decoder.scores(hidden, packed.targets, temperature=self.temperature, chunk=self.chunk_tokens)

    @torch.no_grad()
    def logprobs(self, decoder: Decoder, packed: Packed) -> Tensor:
        """Log-probs [N] on the CPU, without gradient."""
        with self.autocast():
            return self.scores(decoder, packed, self.hidden(decoder, packed))[0].cpu()

    @torch.no_grad()
    def exact_logprobs(self, decoder: Decoder, packed: Packed) -> Tensor:
        """Log-probs [N] by the sampler's own arithmetic: the same bits where rows are proven not to depend on others.

        See `exactness.find_regime`; both sides must use the same regime and the same number of threads.
        """
        regime = self.regime
        if regime is None:
            raise EngineError("exact log-probs need the regime that the sampler's arithmetic was proven in")
        if self.device.type != "cpu" or self.narrow:
            raise EngineError("exact log-probs are made on the CPU without autocast, as the sampler makes its own")
        parts: list[Tensor] = []
        start = 0
        for length in packed.lengths:
            tokens = packed.tokens[start : start + length]
            inside = packed.index[(packed.index >= start) & (packed.index < start + length)] - start
            places = pad_rows(torch.arange(length), regime)
            hidden = decoder(ModelInputs(pad_rows(tokens, regime), places), attention.exact([length], regime))
            for some in torch.split(inside, EXACT_CHUNK):
                logits = decoder.logits(pad_rows(hidden.index_select(0, some - 1), regime))[: len(some)]
                parts.append(token_logprobs(logits, tokens[some], self.temperature))
            start += length
        return torch.cat(parts)
