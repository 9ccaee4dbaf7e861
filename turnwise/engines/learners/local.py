"""The torch learner of one process: gradients of any loss on the policy's tokens, steps, and a state without pickle."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.config import LearnerConfig
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.forward_pass import ForwardPass, Packed
from turnwise.engines.learners.optimizer import Optimizer
from turnwise.engines.learners.reference import Reference
from turnwise.engines.model.attention import Regime
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.lora import LoraDecoder
from turnwise.engines.updates import FullWeights
from turnwise.errors import EngineError, TurnwiseError

FORMAT = 1
"""Of the state; raised when its names change."""
CHUNK_TOKENS = 1024
"""Logits are made for this many tokens at once."""


class NotFinite(TurnwiseError):
    """A loss or a gradient is NaN or infinite; no weight has changed and the gradients so far are dropped."""


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """What the learner computed for the N policy tokens of a packed batch, on the learner's device."""

    logprobs: Tensor
    """[N] with gradient, at the sampling temperature."""
    entropy: Tensor
    """[N] with gradient; backward pays for it only when the loss uses it."""
    values: Tensor | None
    """[N] with gradient when there is a critic, of the state before each token."""
    index: Tensor
    """[N] position of each in the packed batch."""


Loss = Callable[[PolicyTokens], tuple[Tensor, dict[str, float]]]
"""A scalar to differentiate, and metrics."""


class LocalLearner:
    """Trains a decoder, which becomes its own: give it one that nobody else reads.

    A `LoraDecoder` has its factors trained and nothing else. Gradients add up over calls of `forward_backward` until
    `optim_step` uses them. Packed batches are `tokens[T]`, the `lengths` of their sequences, and `index[N]`, the places
    of the policy's tokens. `updates` is where a decay of the learning rate ends; `regime` is the one the sampler writes
    in, where it is proven: exact log-probs need it.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: LearnerConfig,
        *,
        temperature: float,
        critic: Critic | None = None,
        updates: int = 0,
        regime: Regime | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self.device = torch.device(config.device)
        self.forward = ForwardPass(
            self.device, temperature, config.precision, chunk_tokens, config.gradient_checkpointing, regime
        )
        self.decoder = decoder.to(self.device)
        self.critic = None if critic is None else critic.to(self.device)
        _refuse_narrow(self.decoder, self.forward)
        self._optimizers = {"policy": Optimizer(self.decoder.named_parameters(), config, lr=config.lr, updates=updates)}
        if self.critic is not None:
            parameters = self.critic.named_parameters()
            self._optimizers["critic"] = Optimizer(parameters, config, lr=config.critic_lr, updates=updates)
        self.step = 0
        """How many times the weights have changed."""

    def forward_backward(self, tokens: Tensor, lengths: Sequence[int], index: Tensor, loss: Loss) -> dict[str, float]:
        """Add the gradient of one micro-batch; returns the loss's own metrics and `loss`."""
        packed = self.forward.pack(tokens, lengths, index)
        with self.forward.autocast():
            hidden = self.forward.hidden(self.decoder, packed)
            logprobs, entropy = self.forward.scores(self.decoder, packed, hidden)
            values = None if self.critic is None else self._values(self.critic, packed, hidden)
        total, metrics = loss(PolicyTokens(logprobs, entropy, values, packed.index))
        amount = total.item()
        if not math.isfinite(amount):
            self._forget()
            raise NotFinite(f"the loss is {amount} after {self.step} steps")
        total.backward()  # type: ignore[no-untyped-call]
        return {**metrics, "loss": amount}

    def optim_step(self) -> dict[str, float]:
        """Change the weights by the gradients so far; returns `grad_norm` and `lr`, and both of the critic.

        Policy and critic are clipped apart: a wild value loss must not shrink the policy's step.
        """
        norms = {name: optimizer.gradient_norm() for name, optimizer in self._optimizers.items()}
        for name, norm in norms.items():
            if not math.isfinite(norm):
                places = self._optimizers[name].broken()
                where = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
                self._forget()
                raise NotFinite(f"the {name}'s gradient has norm {norm} after {self.step} steps; not finite: {where}")
        metrics: dict[str, float] = {}
        for name, optimizer in self._optimizers.items():
            prefix = "" if name == "policy" else f"{name}_"
            metrics[prefix + "grad_norm"] = norms[name]
            metrics[prefix + "lr"] = optimizer.update(self.step, norms[name])
        self.step += 1
        return metrics

    def logprobs(self, tokens: Tensor, lengths: Sequence[int], index: Tensor, *, exact: bool = False) -> Tensor:
        """Log-probs [N] on the CPU, without gradient.

        `exact` takes the sampler's own arithmetic over the weights as published, which gives its recorded log-probs
        bit by bit where `exactness.find_regime` finds one.
        """
        packed = self.forward.pack(tokens, lengths, index)
        if not exact:
            return self.forward.logprobs(self.decoder, packed)
        merged = isinstance(self.decoder, LoraDecoder)
        decoder = Decoder(self.decoder.config, self.decoder.tensors()) if merged else self.decoder
        return self.forward.exact_logprobs(decoder, packed)

    @torch.no_grad()
    def values(self, tokens: Tensor, lengths: Sequence[int], index: Tensor) -> Tensor:
        """The critic's values [N] of the states before the tokens, on the CPU, without gradient."""
        if self.critic is None:
            raise EngineError("this learner has no critic")
        packed = self.forward.pack(tokens, lengths, index)
        with self.forward.autocast():
            shared = self.forward.hidden(self.decoder, packed) if self.critic.trunk is None else None
            return self._values(self.critic, packed, shared).cpu()

    def _values(self, critic: Critic, packed: Packed, hidden: Tensor | None) -> Tensor:
        if critic.trunk is not None:
            hidden = self.forward.hidden(critic.trunk, packed)
        values: Tensor = critic(hidden)
        return values

    def reference(self) -> Reference:
        """The policy as it is now, frozen; with LoRA its base, at no cost. Ask before a state is loaded."""
        return Reference.of(self.decoder, self.forward)

    def weights(self) -> FullWeights:
        """The policy's weights, LoRA merged; live ones, so a sampler copies them before the next step."""
        return FullWeights(self.decoder.weight_shapes(), self.decoder.weights())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything to go on from here: live tensors by flat names, and what JSON holds.

        Under LoRA the base is not among them; its fingerprint is.
        """
        if any(p.grad is not None for optimizer in self._optimizers.values() for p in optimizer.parameters.values()):
            raise EngineError("gradients wait for a step: a state saved now would lose them")
        tensors: dict[str, Tensor] = {}
        for model, optimizer in self._optimizers.items():
            tensors.update({f"{model}.{name}": p.detach() for name, p in optimizer.parameters.items()})
            tensors.update({f"optimizer.{model}.{name}": tensor for name, tensor in optimizer.state().items()})
        return tensors, {"step": self.step, **self._identity()}

    def load_state(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """Go on from a saved state; one of another model is refused by name before anything changes."""
        mine = self._identity()
        differing = _differences({key: info.get(key) for key in mine}, mine)
        if differing:
            raise EngineError(f"the saved state is of another model: {'; '.join(differing)}")
        places = {f"{model}.{n}": p for model, o in self._optimizers.items() for n, p in o.parameters.items()}
        self._check_names(tensors, places)
        with torch.no_grad():
            for name, parameter in places.items():
                parameter.copy_(tensors[name])
        for model, optimizer in self._optimizers.items():
            prefix = f"optimizer.{model}."
            optimizer.load({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        self.step = int(info["step"])

    def _check_names(self, tensors: Mapping[str, Tensor], places: Mapping[str, nn.Parameter]) -> None:
        missing = sorted(places.keys() - tensors.keys())
        if missing:
            raise EngineError(f"the saved state lacks {', '.join(missing[:5])}")
        for name, tensor in tensors.items():
            if name in places:
                shape: torch.Size | None = places[name].shape
            else:
                kind, model, moment = [*name.split(".", 2), "", ""][:3]
                known = kind == "optimizer" and model in self._optimizers
                shape = self._optimizers[model].expected(moment) if known else None
            if shape is None:
                raise EngineError(f"the saved state holds {name}, which this learner has no place for")
            if tensor.shape != shape or (name in places and tensor.dtype != places[name].dtype):
                found = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise EngineError(f"{name} is {found} in the saved state and {tuple(shape)} here")

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a state to fit."""
        lora = self.decoder if isinstance(self.decoder, LoraDecoder) else None
        identity = {
            "format": FORMAT,
            "decoder": dataclasses.asdict(self.decoder.config),
            "lora": None if lora is None else {"rank": lora.rank, "alpha": lora.alpha, "targets": lora.targets},
            "base": None if lora is None else fingerprint(lora.base()),
            "critic": None if self.critic is None else "shared" if self.critic.trunk is None else "own",
        }
        plain: dict[str, Any] = json.loads(json.dumps(identity))  # lists for tuples, as they come back from a file
        return plain

    def _forget(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.forget()


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> list[str]:
    """What changed, by its dotted name: `decoder.num_layers was 2 and is 4`."""
    found: list[str] = []
    for key in sorted(was.keys() | now.keys()):
        old, new = was.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _differences(old, new, f"{place}{key}.")
        elif old != new:
            found.append(f"{place}{key} was {old!r} and is {new!r}")
    return found


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A short digest of weights. Their bits are summed as integers, which no order of summation changes."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors.items()):
        total = int(tensor.detach().contiguous().view(kinds[tensor.element_size()]).sum(dtype=torch.int64))
        digest.update(f"{name} {tuple(tensor.shape)} {total}\n".encode())
    return digest.hexdigest()


def _refuse_narrow(decoder: Decoder, forward: ForwardPass) -> None:
    """Small steps vanish in bfloat16, so what is trained must be wide; a frozen base may be narrow under autocast."""
    narrow = [name for name, p in decoder.named_parameters() if p.requires_grad and p.dtype.itemsize < 4]
    if narrow:
        raise EngineError(f"{narrow[0]} is {decoder.get_parameter(narrow[0]).dtype}; load what is trained as float32")
    if decoder.dtype.itemsize < 4 and not forward.narrow:
        raise EngineError(f"a base in {decoder.dtype} needs learner precision bfloat16")
