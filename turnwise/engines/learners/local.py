"""The learner of one process and one device: gradients of an objective, steps, reference and critic, and its state."""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.config import LearnerConfig
from turnwise.engines.devices import device_of
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.device_batch import DeviceBatch, on_device
from turnwise.engines.learners.forward_pass import ForwardPass, computes_narrow
from turnwise.engines.learners.learner import Floats, NotFinite, TokenOutputs, UpdateResult, Who
from turnwise.engines.learners.losses import MEANS, Metrics, PolicyTokens, evaluate
from turnwise.engines.learners.objective import Objective
from turnwise.engines.learners.optimizer import Optimizer
from turnwise.engines.learners.state import differences, fingerprint, read_state, write_state
from turnwise.engines.learners.token_batch import TokenBatch
from turnwise.engines.model.attention import Regime
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.policy_folder import PolicyFolder
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.updates import FullWeights
from turnwise.errors import EngineError

CHUNK_TOKENS = 1024
"""Logits are made for this many tokens at once."""

Loss = Callable[[PolicyTokens, DeviceBatch], tuple[Tensor, Metrics]]
"""A scalar to differentiate, and metrics."""


@dataclass(frozen=True, slots=True)
class Accumulated:
    """One micro-batch whose gradient was added; everything is still on the device."""

    loss: Tensor
    metrics: Metrics
    logprobs: Tensor
    entropies: Tensor


class LocalLearner:
    """Trains a policy model, which becomes its own: give it one that nobody else reads. Implements `Learner`.

    Of a model with an adapter the adapter is trained and nothing else. A model that cannot pack
    (`ModelShape.no_packing`) is run over the sequences of a batch one at a time, with the same results. `reference`
    keeps the policy as it is now for `Who.REFERENCE`: the weights below an adapter at no cost, else a frozen copy.
    `updates` is where a decay of the learning rate ends; `regime` is the one the sampler writes in, where it is proven:
    `Who.SAMPLER` needs it. `companions` and `base_model` go into what `save_policy` writes.
    """

    def __init__(
        self,
        model: PolicyModel,
        config: LearnerConfig,
        *,
        temperature: float,
        critic: Critic | None = None,
        reference: bool = False,
        updates: int = 0,
        regime: Regime | None = None,
        companions: PolicyFolder | None = None,
        base_model: str = "",
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self.device = torch.device(device_of(config.device))
        narrow, recompute = computes_narrow(config), bool(config.gradient_checkpointing)
        self.forward = ForwardPass(self.device, temperature, narrow, chunk_tokens, recompute, regime)
        self.model = model.to(self.device)
        self.critic = None if critic is None else critic.to(self.device)
        _refuse_narrow(self.model, self.forward)
        self._has_reference = reference
        self._start = copy.deepcopy(self.model).requires_grad_(False) if reference and not model.has_adapter else None
        """Under an adapter the reference needs no copy."""
        self._companions, self._base_model = companions, base_model
        self._optimizers = {"policy": Optimizer(self.model.named_parameters(), config, lr=config.lr, updates=updates)}
        if self.critic is not None:
            parameters = self.critic.named_parameters()
            self._optimizers["critic"] = Optimizer(parameters, config, lr=config.critic_lr, updates=updates)
        self.step = 0
        """How many times the weights have changed."""

    @torch.no_grad()
    def score(self, batch: TokenBatch, who: Who) -> Floats:
        """One number [N] for every policy token, without gradient."""
        here = on_device(batch, self.device)
        match who:
            case Who.POLICY:
                found = self.forward.logprobs(self.model, here)
            case Who.SAMPLER:
                found = self.forward.exact_logprobs(self._as_published(), here)
            case Who.REFERENCE:
                found = self._reference_logprobs(here)
            case Who.CRITIC:
                if self.critic is None:
                    raise EngineError("this learner has no critic")
                with self.forward.autocast():
                    shared = self.forward.hidden(self.model, here) if self.critic.trunk is None else None
                    found = self._values(self.critic, here, shared)
        return _numpy(found)

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> UpdateResult:
        """One optimizer step on the micro-batches of a minibatch; nothing leaves the device before its end."""
        loss = partial(evaluate, objective=objective)
        try:
            found = [self.accumulate(batch, loss) for batch in batches]
            if not found:
                raise EngineError("an update needs a batch")
            metrics = self._metrics(found, batches)
            logprobs, entropies = (_numpy(torch.cat([getattr(f, n) for f in found])) for n in ("logprobs", "entropies"))
            metrics |= self.optim_step()
        finally:
            self._forget()  # of an update that failed nothing may wait for the next
        outputs: list[TokenOutputs] = []
        start = 0
        for batch in batches:
            part = slice(start, start + len(batch.index))
            outputs.append(TokenOutputs(logprobs[part], entropies[part]))
            start = part.stop
        return UpdateResult(outputs, metrics)

    def accumulate(self, batch: TokenBatch, loss: Loss) -> Accumulated:
        """Add the gradient of one micro-batch to those that `optim_step` will use."""
        here = on_device(batch, self.device)
        with self.forward.autocast():
            hidden = self.forward.hidden(self.model, here)
            logprobs, entropy = self.forward.scores(self.model, here, hidden)
            values = None if self.critic is None else self._values(self.critic, here, hidden)
        total, metrics = loss(PolicyTokens(logprobs, entropy, values), here)
        total.backward()  # type: ignore[no-untyped-call]
        return Accumulated(total.detach(), metrics, logprobs.detach(), entropy.detach())

    def _metrics(self, found: Sequence[Accumulated], batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Shares of the micro-batches added up, and the check that every loss is finite."""
        names = [*found[0].metrics, "loss"]
        rows = torch.stack([torch.stack([f.metrics.get(n, f.loss).double() for n in names]) for f in found]).tolist()
        counted = sum(len(batch.index) for batch in batches)
        totals = dict.fromkeys(names, 0.0)
        for row, batch in zip(rows, batches, strict=True):
            if not math.isfinite(row[-1]):
                raise NotFinite(f"the loss is {row[-1]} after {self.step} steps")
            for name, share in zip(names, row, strict=True):
                totals[name] += share * (batch.minibatch_tokens / counted if name in MEANS else 1.0)
        return totals

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

    def _values(self, critic: Critic, batch: DeviceBatch, hidden: Tensor | None) -> Tensor:
        if critic.trunk is not None:
            hidden = self.forward.hidden(critic.trunk, batch)
        values: Tensor = critic(hidden)
        return values

    def _reference_logprobs(self, batch: DeviceBatch) -> Tensor:
        if not self._has_reference:
            raise EngineError("this learner was not asked to keep a reference")
        if self._start is not None:
            return self.forward.logprobs(self._start, batch)
        with self.model.without_adapter():
            return self.forward.logprobs(self.model, batch)

    def _as_published(self) -> PolicyModel:
        """The policy as a sampler has it: bits are promised of the native decoder only, LoRA merged into it."""
        if not isinstance(self.model, Decoder):
            raise EngineError(f"{type(self.model).__name__} has no arithmetic that is proven to be the sampler's")
        return Decoder(self.model.config, self.model.tensors()) if self.model.has_adapter else self.model

    def weights(self) -> FullWeights:
        """The policy's weights, an adapter merged; live ones, so a sampler copies them before the next step."""
        return FullWeights(self.model.weight_shapes(), self.model.weights())

    def save(self, folder: Path) -> None:
        """`learner.safetensors`: what is trained, the optimizer's moments, and how many steps were taken."""
        write_state(folder, *self.state())

    def load(self, folder: Path) -> None:
        """Go on from a saved state; one of another model is refused by name before anything changes."""
        self.load_state(*read_state(folder))

    def save_policy(self, folder: Path) -> None:
        """`policy`, a Hugging Face folder, and peft's `policy_adapter` of a model that has an adapter."""
        (self._companions or PolicyFolder({})).save(folder / "policy", self.model)
        if self.model.has_adapter:
            self.model.save_adapter(folder / "policy_adapter", self._base_model)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything to go on from here: live tensors by flat names, and what JSON holds.

        What is frozen below an adapter is not among them; its fingerprint is.
        """
        if any(p.grad is not None for optimizer in self._optimizers.values() for p in optimizer.parameters.values()):
            raise EngineError("gradients wait for a step: a state saved now would lose them")
        tensors: dict[str, Tensor] = {}
        for model, optimizer in self._optimizers.items():
            tensors.update({f"{model}.{name}": p.detach() for name, p in optimizer.parameters.items()})
            tensors.update({f"optimizer.{model}.{name}": tensor for name, tensor in optimizer.state().items()})
        return tensors, {"step": self.step, **self._identity()}

    def load_state(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """What `load` does, of what `state` gives."""
        mine = self._identity()
        differing = differences({key: info.get(key) for key in mine}, mine)
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
        frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        identity = {
            **self.model.facts,
            "base": fingerprint(frozen) if frozen else None,
            "critic": None if self.critic is None else "shared" if self.critic.trunk is None else "own",
        }
        plain: dict[str, Any] = json.loads(json.dumps(identity))  # lists for tuples, as they come back from a file
        return plain

    def _forget(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.forget()


def _numpy(found: Tensor) -> Floats:
    array: Floats = found.float().cpu().numpy()
    return array


def _refuse_narrow(model: PolicyModel, forward: ForwardPass) -> None:
    """Small steps vanish in bfloat16, so what is trained must be wide; a frozen base may be narrow under autocast."""
    narrow = {name: p for name, p in model.named_parameters() if p.is_floating_point() and p.dtype.itemsize < 4}
    for name, parameter in narrow.items():
        if parameter.requires_grad:
            raise EngineError(f"{name} is {parameter.dtype}; load what is trained as float32")
        if not forward.narrow:
            raise EngineError(f"a base in {parameter.dtype} needs learner precision bfloat16")
