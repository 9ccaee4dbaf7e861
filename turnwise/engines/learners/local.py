"""The learner of one process and one device: gradients of an objective, steps, reference and critic, and its state."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.config import LearnerConfig
from turnwise.config.choices import OptimizerName
from turnwise.engines.devices import device_of
from turnwise.engines.learners.activation_memory import ActivationMemory, free_bytes, logit_rows
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.device_batch import DeviceBatch, on_device
from turnwise.engines.learners.forward_pass import ForwardPass, computes_narrow
from turnwise.engines.learners.learner import Floats, NotFinite, Objective, TokenBatch, TokenOutputs, UpdateResult, Who
from turnwise.engines.learners.losses import MEANS, Metrics, PolicyTokens, evaluate
from turnwise.engines.learners.optimizer import Optimizer
from turnwise.engines.learners.splitting import Attempt, BatchPart, halves, whole
from turnwise.engines.learners.state import below, check_names, differences, identity, read_state, write_state
from turnwise.engines.learners.watching import count_progress
from turnwise.engines.learners.working_weights import make_working, refuse_narrow, working_dtype
from turnwise.engines.model.attention import Regime
from turnwise.engines.model.decoder import Decoder
from turnwise.engines.model.policy_folder import PolicyFolder
from turnwise.engines.model.policy_model import PolicyModel
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError

CHUNK_TOKENS = 1024
"""Logits are made for this many tokens at once on the CPU; on a GPU memory decides."""

TOKEN_OUTPUTS = ("logprobs", "entropies")

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
    `Who.SAMPLER` needs it, or on a GPU `invariant` kernels. `companions` and `base_model` go into what `save_policy`
    writes.

    `working` is the number format of the weights that are computed with, by default bfloat16 where the config computes
    so on a GPU and trains all weights: the optimizer then has the float32 ones. A batch that does not fit a GPU's
    memory is worked off in smaller parts, which `warn` is told; `memory_bytes` is what gradients, activations and
    logits may take together, by default what is free.
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
        invariant: bool = False,
        companions: PolicyFolder | None = None,
        base_model: str = "",
        chunk_tokens: int | None = None,
        working: torch.dtype | None = None,
        memory_bytes: int | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.device = torch.device(device_of(config.device))
        dtype = working or working_dtype(config, model)
        autocast = computes_narrow(config) and dtype is torch.float32
        refuse_narrow(model, working=dtype, autocast=autocast)
        self._config, self._warn = config, warn
        if chunk_tokens is None:
            chunk_tokens = CHUNK_TOKENS
            if self.device.type == "cuda":
                chunk_tokens = logit_rows(model.shape.vocab_size, memory_bytes or free_bytes(self.device))
        self.forward = ForwardPass(self.device, temperature, autocast, chunk_tokens, regime, invariant)
        self.model, wide = make_working(model, self.device, dtype, invariant=invariant)
        self._has_reference = reference
        self._start = copy.deepcopy(self.model).requires_grad_(False) if reference and not model.has_adapter else None
        """Under an adapter the reference needs no copy."""
        self._companions, self._base_model = companions, base_model
        policy = Optimizer(self.model.named_parameters(), config, lr=config.lr, updates=updates, wide=wide)
        self._optimizers, self.critic = {"policy": policy}, critic
        if self.critic is not None:
            self._optimizers["critic"] = self._open_critic(self.critic, dtype, updates)
        self._memory = ActivationMemory(
            [self.model, *([critic.trunk] if critic is not None and critic.trunk is not None else [])],
            config,
            self.device,
            gradients=sum(optimizer.gradient_bytes for optimizer in self._optimizers.values()),
            moments_to_come=lambda: sum(optimizer.moments_to_come() for optimizer in self._optimizers.values()),
            logit_bytes=4 * chunk_tokens * model.shape.vocab_size,
            memory_bytes=memory_bytes,
        )
        self.step = 0
        """How many times the weights have changed."""

    def _open_critic(self, critic: Critic, dtype: torch.dtype, updates: int) -> Optimizer:
        """The critic's trunk computes as the policy does; its head is float32."""
        wide: dict[str, Tensor] = {}
        if critic.trunk is not None:
            critic.trunk, masters = make_working(critic.trunk, self.device, dtype, invariant=self.forward.invariant)
            wide = {f"trunk.{name}": tensor for name, tensor in masters.items()}
        parameters, lr = critic.to(self.device).named_parameters(), self._config.critic_lr
        return Optimizer(parameters, self._config, lr=lr, updates=updates, wide=wide)

    @property
    def token_budget(self) -> int:
        """Tokens of one pass that there is room for; with `learner.token_budget`, that many."""
        return self._memory.token_budget

    @torch.no_grad()
    def score(self, batch: TokenBatch, who: Who) -> Floats:
        """One number [N] for every policy token, without gradient."""
        parts: list[tuple[BatchPart, Tensor]] = []
        for attempt in self._attempts(batch):
            with attempt:
                parts.append((attempt.part, self._scored(on_device(attempt.part.batch, self.device), who)))
        scores = _numpy(torch.cat([scores for _, scores in parts]))
        return _laid_out(scores, [part for part, _ in parts])

    def _scored(self, here: DeviceBatch, who: Who) -> Tensor:
        match who:
            case Who.POLICY:
                return self.forward.logprobs(self.model, here)
            case Who.SAMPLER:
                return self.forward.exact_logprobs(self._as_published(), here)
            case Who.REFERENCE:
                return self._reference_logprobs(here)
            case Who.CRITIC:
                if self.critic is None:
                    raise EngineError("this learner has no critic")
                with self.forward.autocast():
                    shared = self.forward.hidden(self.model, here) if self.critic.trunk is None else None
                    return self._values(self.critic, here, shared)

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> UpdateResult:
        """One optimizer step on the micro-batches of a minibatch; the host waits for the device once, before it."""
        loss = partial(evaluate, objective=objective)
        by_batch: list[list[tuple[BatchPart, Accumulated]]] = []
        try:
            for batch in batches:
                by_batch.append([])
                for attempt in self._attempts(batch):
                    with attempt:
                        by_batch[-1].append((attempt.part, self.accumulate(attempt.part.batch, loss)))
            done = [entry for parts in by_batch for entry in parts]
            if not done:
                raise EngineError("an update needs a batch")
            norms = {name: optimizer.gradient_norm() for name, optimizer in self._optimizers.items()}
            metrics, norm_values = self._metrics(
                [accumulated for _, accumulated in done], [part.batch for part, _ in done], norms
            )
            logprobs, entropies = (
                _numpy(torch.cat([getattr(accumulated, n) for _, accumulated in done])) for n in TOKEN_OUTPUTS
            )
            metrics |= self._step(norm_values)
        finally:
            self._forget()  # of an update that failed nothing may wait for the next
        outputs: list[TokenOutputs] = []
        start = 0
        for batch, parts in zip(batches, by_batch, strict=True):
            own, places = slice(start, start + len(batch.index)), [part for part, _ in parts]
            outputs.append(TokenOutputs(_laid_out(logprobs[own], places), _laid_out(entropies[own], places)))
            start = own.stop
        return UpdateResult(outputs, metrics)

    def _attempts(self, batch: TokenBatch) -> Iterator[Attempt]:
        """The whole batch, or halves of what does not fit the memory, each to be worked on `with` the attempt."""
        waiting = [whole(batch)]
        while waiting:
            part = waiting.pop()
            if self._memory.exceeded_by(len(part.batch.tokens)) and len(smaller := halves(part)) > 1:
                waiting += reversed(smaller)
                continue
            attempt = Attempt(part)
            yield attempt
            count_progress()
            # Out here nothing holds what a failed pass had allocated any more.
            if attempt.refused is not None:
                waiting += reversed(self._smaller(part, attempt.refused))

    def _smaller(self, part: BatchPart, refused: str) -> list[BatchPart]:
        """What to do instead of a part that did not fit."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        tokens, smaller = len(part.batch.tokens), halves(part)
        if len(smaller) > 1:
            limit = self._memory.shrink(tokens)
            self._warn(
                f"a pass over {tokens} tokens does not fit the learner's memory: it is split in two, and later "
                f"ones have at most {limit} tokens"
            )
        elif self._memory.recompute_all():
            self._warn(
                f"a trajectory of {tokens} tokens does not fit the learner's memory: activations are recomputed "
                "from now on instead of kept"
            )
        else:
            raise EngineError(
                f"a single trajectory of {tokens} tokens does not fit the learner's memory: shorten it "
                "(rollout.max_tokens), or make room (learner.gradient_checkpointing=true, learner.optimizer=adamw8bit, "
                f"learner.offload=optimizer, learner.lora_rank=16, engine.memory_fraction); {refused.splitlines()[0]}"
            )
        return smaller

    def accumulate(self, batch: TokenBatch, loss: Loss) -> Accumulated:
        """Add the gradient of one micro-batch to those that `optim_step` will use; one that fails adds nothing."""
        here, again = on_device(batch, self.device), self._memory.layers_again(len(batch.tokens))
        with self._memory.measured(len(batch.tokens)), ExitStack() as adding:
            with self.forward.autocast():
                hidden = self.forward.hidden(self.model, here, again)
                logprobs, entropy = self.forward.scores(self.model, here, hidden)
                values = None if self.critic is None else self._values(self.critic, here, hidden, again)
            total, metrics = loss(PolicyTokens(logprobs, entropy, values), here)
            for optimizer in self._optimizers.values():
                adding.enter_context(optimizer.gradients.adding())
            total.backward()  # type: ignore[no-untyped-call]
        return Accumulated(total.detach(), metrics, logprobs.detach(), entropy.detach())

    def _metrics(
        self, results: Sequence[Accumulated], batches: Sequence[TokenBatch], norms: Mapping[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Shares of the micro-batches added up and the gradients' norms; every loss must be finite."""
        names = [*results[0].metrics, "loss"]
        shares = [f.metrics.get(n, f.loss).double() for f in results for n in names]
        numbers = torch.stack([*shares, *(norm.double() for norm in norms.values())]).tolist()
        counted = sum(len(batch.index) for batch in batches)
        totals = dict.fromkeys(names, 0.0)
        for number, batch in enumerate(batches):
            row = numbers[number * len(names) : (number + 1) * len(names)]
            if not math.isfinite(row[-1]):
                raise NotFinite(f"the loss is {row[-1]} after {self.step} weight updates")
            for name, share in zip(names, row, strict=True):
                totals[name] += share * (batch.minibatch_tokens / counted if name in MEANS else 1.0)
        return totals, dict(zip(norms, numbers[len(shares) :], strict=True))

    def optim_step(self) -> dict[str, float]:
        """Change the weights by the gradients so far; returns `grad_norm` and `lr`, and both of the critic."""
        return self._step({name: float(optimizer.gradient_norm()) for name, optimizer in self._optimizers.items()})

    def _step(self, norms: Mapping[str, float]) -> dict[str, float]:
        """Policy and critic are clipped apart: a wild value loss must not shrink the policy's step."""
        for name, norm in norms.items():
            if not math.isfinite(norm):
                places = self._optimizers[name].broken()
                where = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
                self._forget()
                raise NotFinite(f"the {name}'s gradient has norm {norm} after {self.step} updates; not finite: {where}")
        metrics: dict[str, float] = {}
        for name, optimizer in self._optimizers.items():
            prefix = "" if name == "policy" else f"{name}_"
            metrics[prefix + "grad_norm"] = norms[name]
            try:
                metrics[prefix + "lr"] = optimizer.update(self.step, norms[name])
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"the {name}'s optimizer does not fit the learner's memory (learner.optimizer=adamw8bit, "
                    f"learner.offload=optimizer and learner.lora_rank=16 take less): {str(error).splitlines()[0]}"
                ) from error
        self.step += 1
        return metrics

    def _values(self, critic: Critic, batch: DeviceBatch, hidden: Tensor | None, recompute: int = 0) -> Tensor:
        if critic.trunk is not None:
            hidden = self.forward.hidden(critic.trunk, batch, recompute)
        values: Tensor = critic(hidden)
        return values

    def _reference_logprobs(self, batch: DeviceBatch) -> Tensor:
        if not self._has_reference:
            raise EngineError("this learner has no reference policy")
        if self._start is not None:
            return self.forward.logprobs(self._start, batch)
        with self.model.without_adapter():
            return self.forward.logprobs(self.model, batch)

    def _as_published(self) -> PolicyModel:
        """The policy as a sampler has it: bits are promised of the native decoder only, LoRA merged into it."""
        if not isinstance(self.model, Decoder):
            raise EngineError(f"{type(self.model).__name__} has no arithmetic that is proven equal to the sampler's")
        if not self.model.has_adapter:
            return self.model
        merged = Decoder(self.model.config, self.model.tensors())
        dtype = torch.bfloat16 if computes_narrow(self._config) else torch.float32
        return make_working(merged, self.device, dtype, invariant=True)[0] if self.forward.invariant else merged

    def weights(self) -> FullWeights:
        """The policy's weights, an adapter merged; live ones, so a sampler copies them before the next step."""
        return FullWeights(self.model.weight_shapes(), self.model.weights())

    def save(self, folder: Path) -> None:
        """`learner.safetensors`: what is trained, the optimizer's moments, and how many steps were taken."""
        write_state(folder, *self.state())

    saving = False
    """`save` returns when it has written."""

    def saved(self) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """Does nothing: this learner runs no other processes."""

    def load(self, folder: Path) -> None:
        """Go on from a saved state; one of another model is refused by name before anything changes."""
        self.load_state(*read_state(folder))

    def save_policy(self, folder: Path) -> None:
        """`policy`, a Hugging Face folder, and peft's `policy_adapter` of a model that has an adapter."""
        (self._companions or PolicyFolder({})).save(folder / "policy", self.model)
        self.save_adapter(folder / "policy_adapter")

    def save_adapter(self, folder: Path) -> bool:
        """In peft's format, where the model has one."""
        if self.model.has_adapter:
            self.model.save_adapter(folder, self._base_model)
        return self.model.has_adapter

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything to go on from here: live tensors by flat names, and what JSON holds.

        What is frozen below an adapter is not among them; its fingerprint is.
        """
        if any(optimizer.gradients.waiting for optimizer in self._optimizers.values()):
            raise EngineError("there are gradients that no step has used yet: saving now would lose them")
        tensors: dict[str, Tensor] = {}
        for model, optimizer in self._optimizers.items():
            tensors.update({f"{model}.{name}": master.detach() for name, master in optimizer.masters.items()})
            tensors.update({f"optimizer.{model}.{name}": tensor for name, tensor in optimizer.state().items()})
        return tensors, {"step": self.step, "optimizer": self._config.optimizer.value, **self._identity()}

    def load_state(self, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """What `load` does, of what `state` gives."""
        mine = self._identity()
        differing = differences({key: info.get(key) for key in mine}, mine)
        if differing:
            raise EngineError(f"the saved state is of another model: {'; '.join(differing)}")
        saved = info.get("optimizer", OptimizerName.adamw.value)
        if saved != self._config.optimizer.value:
            here = self._config.optimizer.value
            raise EngineError(
                f"the saved state is of learner.optimizer={saved}, which learner.optimizer={here} cannot read"
            )
        places = {f"{model}.{n}": m for model, o in self._optimizers.items() for n, m in o.masters.items()}
        check_names(tensors, places, self._moment_shape)
        for model, optimizer in self._optimizers.items():
            optimizer.load(below(tensors, f"{model}."), below(tensors, f"optimizer.{model}."))
        self.step = int(info["step"])

    def _moment_shape(self, name: str) -> torch.Size | None:
        """Of `optimizer.MODEL.NAME.KIND`, None for what has no place here."""
        kind, model, moment = [*name.split(".", 2), "", ""][:3]
        is_moment = kind == "optimizer" and model in self._optimizers
        return self._optimizers[model].expected(moment) if is_moment else None

    def _identity(self) -> dict[str, Any]:
        return identity(self.model, self.critic)

    def _forget(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.forget()


def _numpy(tensor: Tensor) -> Floats:
    array: Floats = tensor.float().cpu().numpy()
    return array


def _laid_out(values: Floats, parts: Sequence[BatchPart]) -> Floats:
    """The values of the parts of a batch, which come one part behind the other, in the order of the batch."""
    if len(parts) == 1:
        return values
    ordered = np.empty_like(values)
    ordered[np.concatenate([part.places for part in parts])] = values
    return ordered
