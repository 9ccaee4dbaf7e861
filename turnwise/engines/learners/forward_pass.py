"""A policy model run over packed sequences: the states before chosen tokens, and the log-probs these tokens get."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.config import LearnerConfig
from turnwise.config.choices import Precision
from turnwise.engines.devices import learner_here
from turnwise.engines.learners.device_batch import DeviceBatch, ImageSequence
from turnwise.engines.model import attention
from turnwise.engines.model.attention import pad_rows
from turnwise.engines.model.image_features import Stretch, joined_features, joined_positions
from turnwise.engines.model.policy_model import Attend, ModelInputs, PolicyModel
from turnwise.engines.model.recurrence import Recurrence
from turnwise.engines.model.routing import Routing
from turnwise.engines.model.token_logprobs import token_logprobs
from turnwise.errors import EngineError

EXACT_CHUNK = 1024
"""Logits at once in exact mode; a multiple of every regime's row_pad."""


def computes_narrow(config: LearnerConfig) -> bool:
    """Whether a learner of this config takes its products in bfloat16: on a GPU, when nothing else is said."""
    return learner_here(config).precision is Precision.bfloat16


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Where and how a model runs: `ForwardPass(torch.device("cpu"), temperature=1.0)`.

    Nothing here needs a batch dimension or padding. The sequences of a batch share one pass, except with a model that
    cannot keep them apart (`ModelShape.no_packing`): there each has a pass of its own.
    """

    device: torch.device
    temperature: float
    narrow: bool = False
    """Take products in bfloat16, whatever the format of the weights."""
    chunk_tokens: int = 1024
    """Logits are made for this many tokens at once."""
    regime: attention.Regime | None = None
    """The sampler's on the CPU, for exact log-probs."""
    invariant: bool = False
    """On a GPU, take every product and sum as the sampler does there, so that log-probs are its own to the last bit."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise EngineError(f"temperature must be 0 or more, found {self.temperature}")
        if self.chunk_tokens < 1:
            raise EngineError(f"chunk_tokens must be positive, found {self.chunk_tokens}")

    def autocast(self) -> AbstractContextManager[object]:
        """The number format of products inside."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.narrow else nullcontext()

    def hidden(
        self, model: PolicyModel, batch: DeviceBatch, recompute: int = 0, watched: list[Routing] | None = None
    ) -> Tensor:
        """The states [N, H] from which the policy's tokens are predicted; see `PolicyModel.forward` for `recompute`.
        What the routers of each pass do is added to `watched`."""
        _check_vision(model, batch)
        if model.shape.no_packing is None:
            images, experts = batch.image_sequences, batch.experts
            routing = _routing(experts, watched)
            return self._states(model, batch.tokens, batch.lengths, batch.index - 1, recompute, images, routing)
        return torch.cat(
            [
                self._states(model, tokens, [len(tokens)], rows - 1, recompute, sequences, _routing(experts, watched))
                for tokens, rows, sequences, experts in _apart(batch)
            ]
        )

    def _states(
        self,
        model: PolicyModel,
        tokens: Tensor,
        lengths: Sequence[int],
        rows: Tensor,
        recompute: int,
        sequences: Sequence[ImageSequence],
        routing: Routing | None,
    ) -> Tensor:
        inputs = self._inputs(model, tokens, lengths, sequences)
        if routing is not None:
            inputs = replace(inputs, routing=routing)
        states: Tensor = model(inputs, self._attend(model, lengths), rows=rows, recompute=recompute)
        return states

    def _inputs(
        self, model: PolicyModel, tokens: Tensor, lengths: Sequence[int], sequences: Sequence[ImageSequence]
    ) -> ModelInputs:
        recurrence = Recurrence(tuple(lengths)) if model.shape.states else None
        if any(sequence.media for sequence in sequences):
            return self._with_images(model, tokens, sequences, recurrence)
        places = attention.sent(attention.positions(lengths), self.device)
        return ModelInputs(tokens, places, recurrence=recurrence)

    def _with_images(
        self, model: PolicyModel, tokens: Tensor, sequences: Sequence[ImageSequence], recurrence: Recurrence | None
    ) -> ModelInputs:
        """Tokens with images among them; each image is encoded once, however often it is there."""
        features = iter(model.encode_images([span.media for sequence in sequences for span in sequence.media]))
        stretches = [
            Stretch([(span, next(features)) for span in sequence.media], 0, len(sequence.tokens))
            for sequence in sequences
        ]
        places = joined_positions([model.positions(sequence.tokens, sequence.media) for sequence in sequences])
        return ModelInputs(
            tokens,
            attention.sent(torch.from_numpy(places), self.device),
            joined_features(stretches, self.device),
            recurrence,
        )

    def _attend(self, model: PolicyModel, lengths: Sequence[int]) -> Attend:
        if self.device.type != "cuda":
            return attention.packed(lengths, self.device)
        from turnwise.engines.model.packed_attention import attend_for  # its kernels are there with CUDA only

        return attend_for(lengths, self.device, model, self.invariant)

    def scores(self, model: PolicyModel, batch: DeviceBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] of the policy's tokens at the sampling temperature."""
        return model.scores(hidden, batch.targets, temperature=self.temperature, chunk=self.chunk_tokens)

    @torch.no_grad()
    def logprobs(self, model: PolicyModel, batch: DeviceBatch) -> Tensor:
        """Log-probs [N] without gradient."""
        with self.autocast():
            return self.scores(model, batch, self.hidden(model, batch))[0]

    @torch.no_grad()
    def exact_logprobs(self, model: PolicyModel, batch: DeviceBatch) -> Tensor:
        """Log-probs [N] by the sampler's own arithmetic: the same bits where rows are proven not to depend on others.

        On the CPU see `threads.find_regime`: both sides must use the same regime and the same number of threads. On a
        GPU the invariant kernels are the sampler's.
        """
        if self.device.type == "cuda" and self.invariant:
            return self.logprobs(model, batch)
        regime = self.regime
        if regime is None:
            raise EngineError("exact log-probs need the regime that the sampler's arithmetic was proven in")
        if self.device.type != "cpu" or self.narrow:
            raise EngineError("exact log-probs are made on the CPU without autocast, as the sampler makes its own")
        if batch.image_sequences:
            raise EngineError("log-probs by the sampler's own arithmetic are made of text alone, and there are images")
        parts: list[Tensor] = []
        for tokens, inside, *_ in _apart(batch):
            places = pad_rows(torch.arange(len(tokens)), regime)
            hidden = model(ModelInputs(pad_rows(tokens, regime), places), attention.exact([len(tokens)], regime))
            for rows in torch.split(inside, EXACT_CHUNK):
                logits = model.logits(pad_rows(hidden.index_select(0, rows - 1), regime))[: len(rows)]
                parts.append(token_logprobs(logits, tokens[rows], self.temperature))
        return torch.cat(parts)


def _routing(experts: Tensor | None, watched: list[Routing] | None) -> Routing | None:
    """Of one pass, where routers are told or watched."""
    routing = None if experts is None and watched is None else Routing(experts)
    if watched is not None and routing is not None:
        watched.append(routing)
    return routing


def _check_vision(model: PolicyModel, batch: DeviceBatch) -> None:
    if batch.image_sequences and not model.reads_images:
        raise EngineError(f"{type(model).__name__} reads text only, and there are images in this batch")


def _apart(batch: DeviceBatch) -> list[tuple[Tensor, Tensor, tuple[ImageSequence, ...], Tensor | None]]:
    """The tokens of each sequence that has any of the policy's, the places of those in it, its images and experts."""
    tokens, index = torch.split(batch.tokens, [*batch.lengths]), torch.split(batch.index, [*batch.written])
    sequences: list[tuple[Tensor, Tensor, tuple[ImageSequence, ...], Tensor | None]] = []
    start = 0
    for number, (own, inside) in enumerate(zip(tokens, index, strict=True)):
        if len(inside):
            experts = None if batch.experts is None else batch.experts[start : start + len(own)]
            sequences.append((own, inside - start, batch.image_sequences[number : number + 1], experts))
        start += len(own)
    return sequences
