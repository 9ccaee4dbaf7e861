"""One rank of a sharded learner: its part of the weights (FSDP2) and of the optimizer, its share of every pass."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from turnwise.engines.learners.activation_memory import ActivationMemory, free_bytes, logit_rows
from turnwise.engines.learners.critic import Critic
from turnwise.engines.learners.device_batch import DeviceBatch, on_device
from turnwise.engines.learners.learner import Floats, Objective, TokenBatch, Who
from turnwise.engines.learners.local import CHUNK_TOKENS
from turnwise.engines.learners.losses import PolicyTokens, evaluate
from turnwise.engines.learners.optimizer import Optimizer
from turnwise.engines.learners.process_group import Failed, failed
from turnwise.engines.learners.state import below, check_names, differences
from turnwise.engines.learners.watching import count_progress
from turnwise.engines.model.tensor_file import formats_of, write_stream
from turnwise.errors import EngineError, StorageError
from turnwise.ext.fsdp import state as sharded_state
from turnwise.ext.fsdp.models import open_models
from turnwise.ext.fsdp.rank_setup import RankPlace, RankSetup
from turnwise.ext.fsdp.shards import WeightGatherer, local_part, shared_out_as
from turnwise.ext.fsdp.sliced_pass import ContextGroup, SlicedPass

STREAM_BYTES = 64 * 2**20
"""Weights that go to the driver in one answer, unless a single one is larger."""
PATIENCE = 7200.0
"""Seconds for a collective, at least: whoever called the ranks watches them more closely (learner.hang_seconds)."""
IDLE = TokenBatch(
    np.zeros(2, np.int64), np.array([2]), np.array([1]), np.zeros(1, np.int64), np.ones(1, np.int64), 1, 1
)
"""What a rank computes in a pass that it has no share of: the others need it in their collectives."""

Weight = tuple[str, torch.dtype, tuple[int, ...], NDArray[np.uint8]]
"""Name, number format, shape and bytes."""


@dataclass(frozen=True, slots=True)
class RankResults:
    """What came of a rank's passes; its gradients wait for a step."""

    losses: list[float]
    """Of the passes that it had a share of, as is all below but the norms."""
    metrics: list[dict[str, float]]
    logprobs: list[Floats]
    """Of every pass, empty where it had no share."""
    entropies: list[Floats]
    squares: dict[str, float]
    """By optimizer, the square of the norm of this rank's part of the gradient."""
    broken: dict[str, list[str]]
    """By optimizer, parameters whose gradient is not finite."""
    error: Failed | None
    """What a loss raised; the rank went on with the others, so that none waits for it."""


class Rank:
    """Opened in its own process by every rank of a group at once; its methods are called on all of them at once."""

    def __init__(self, setup: RankSetup, position: RankPlace) -> None:
        torch.set_num_threads(position.threads)
        self.device, self._place = torch.device(position.device), position
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._config = replace(setup.learner, device=position.device)
        timeout = timedelta(seconds=max(PATIENCE, 2 * setup.learner.hang_seconds))
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=_meeting(position, timeout),
            rank=position.rank,
            world_size=position.size,
            timeout=timeout,
        )
        self._files = dist.new_group(backend="gloo", timeout=timeout)
        """For checkpoints, which are written while the others compute."""
        self._context = _context(setup.context, timeout)
        mesh = _mesh(self.device.type, position.size, setup.replicas)
        models = open_models(setup, self._config, mesh, self._files)
        dist.barrier(group=self._files)
        count_progress()
        self._models, vocabulary = models, models.policy.shape.vocab_size
        rows = CHUNK_TOKENS if self.device.type == "cpu" else logit_rows(vocabulary, free_bytes(self.device))
        self._forward = SlicedPass(self.device, setup.temperature, models.autocast, rows, context=self._context)
        self._whole = WeightGatherer(self.device)
        lrs = {"policy": self._config.lr, "critic": self._config.critic_lr}
        self._local = {
            name: {key: nn.Parameter(local_part(p)) for key, p in parameters.items()}
            for name, parameters in models.trained.items()
        }
        self._optimizers = {
            name: Optimizer(local.items(), self._config, lr=lrs[name], updates=setup.updates)
            for name, local in self._local.items()
        }
        trunk = None if models.critic is None else models.critic.trunk
        self._memory = ActivationMemory(
            [models.policy, *([] if trunk is None else [trunk])],
            self._config,
            self.device,
            gradients=sum(optimizer.gradient_bytes for optimizer in self._optimizers.values()),
            moments_to_come=lambda: sum(optimizer.moments_to_come() for optimizer in self._optimizers.values()),
            logit_bytes=4 * rows * vocabulary,
            memory_bytes=None,
        )
        self._step, self._published = 0, setup.published
        self._stream: Iterator[tuple[str, Tensor]] = iter(())
        self._saving: Future[Any] | None = None

    def leave(self) -> None:
        """Leave the group, so that the process can join another."""
        dist.destroy_process_group()

    def token_budget(self) -> int:
        """Tokens of one pass that this rank has room for."""
        return self._memory.token_budget

    def text_only(self) -> str | None:
        """Why the policy takes no images, as far as this rank has looked; None where it does."""
        return self._models.text_only

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights that `next_weights` streams, by name."""
        return {name: tuple(kind.shape) for name, kind in self._models.kinds.items()}

    # --- passes -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, passes: Sequence[TokenBatch | None], who: Who) -> list[Floats]:
        """One number for every policy token of each pass."""
        models = self._models
        root = models.reference if who is Who.REFERENCE and models.reference is not None else models.root
        results = []
        for batch in passes:
            here = on_device(batch or IDLE, self.device)
            scores = root(lambda here=here: self._scored(here, who))
            cast(
                FSDPModule, root
            ).reshard()  # without a backward pass nobody else does, and the next would see old weights
            results.append(_numpy(scores) if batch is not None else np.zeros(0, np.float32))
            count_progress()
        return results

    def _scored(self, here: DeviceBatch, who: Who) -> Tensor:
        models, forward = self._models, self._forward
        match who:
            case Who.POLICY:
                return forward.logprobs(models.policy, here)
            case Who.REFERENCE if models.reference is not None:
                return forward.logprobs(models.reference.policy, here)
            case Who.REFERENCE:
                with models.policy.without_adapter():
                    return forward.logprobs(models.policy, here)
            case Who.CRITIC if models.critic is not None:
                with forward.autocast():
                    shared = forward.hidden(models.policy, here) if models.critic.trunk is None else None
                    return self._values(models.critic, here, shared)
        raise EngineError(f"a learner of several processes has no scores of the {who.value}")

    def accumulate(self, passes: Sequence[TokenBatch | None], objective: Objective) -> RankResults:
        """Gradients of this rank's share of a minibatch, summed over all ranks and laid out over them."""
        self.forget()
        totals = RankResults([], [], [], [], {}, {}, None)
        for batch in passes:
            totals = self._pass(batch, objective, totals)
            count_progress()
        for name, parameters in self._models.trained.items():
            for key, parameter in parameters.items():
                idle = parameter.grad is None or (name == "critic" and key in self._models.unused)
                self._local[name][key].grad = None if idle else local_part(cast(Tensor, parameter.grad))
        for name, optimizer in self._optimizers.items():
            norm = float(optimizer.gradient_norm().double())
            totals.squares[name] = norm * norm
            totals.broken[name] = [] if math.isfinite(norm) else optimizer.broken()
        return totals

    def _pass(self, batch: TokenBatch | None, objective: Objective, totals: RankResults) -> RankResults:
        here = on_device(batch or IDLE, self.device)
        tokens = -(-len(here.tokens) // (1 if self._context is None else self._context.size))
        again = self._memory.layers_again(tokens)
        if self._context is not None:  # a layer that is computed again attends again, with all of them
            again = self._context.most(again)
        with self._memory.measured(tokens):
            outputs = PolicyTokens(*self._models.root(lambda: self._forwarded(here, again)))
            error = totals.error
            parts = [part for part in (outputs.logprobs, outputs.entropy, outputs.values) if part is not None]
            total = torch.stack([part.sum() for part in parts]).sum() * 0.0
            if batch is not None and error is None:
                try:
                    total, metrics = evaluate(outputs, here, objective)
                    totals.losses.append(float(total.detach()))
                    totals.metrics.append({name: float(value) for name, value in metrics.items()})
                except Exception as raised:  # a user's loss may raise anything: the others wait for our backward pass
                    error = failed(raised)
            total.backward()  # type: ignore[no-untyped-call]
        none = np.zeros(0, np.float32)
        totals.logprobs.append(none if batch is None else _numpy(outputs.logprobs.detach()))
        totals.entropies.append(none if batch is None else _numpy(outputs.entropy.detach()))
        return replace(totals, error=error)

    def _forwarded(self, here: DeviceBatch, again: int) -> tuple[Tensor, Tensor, Tensor | None]:
        models, forward = self._models, self._forward
        with forward.autocast():
            hidden = forward.hidden(models.policy, here, again)
            logprobs, entropy = forward.scores(models.policy, here, hidden)
            values = None if models.critic is None else self._values(models.critic, here, hidden, again)
        return logprobs, entropy, values

    def _values(self, critic: Critic, batch: DeviceBatch, hidden: Tensor | None, recompute: int = 0) -> Tensor:
        if critic.trunk is not None:
            hidden = self._forward.hidden(critic.trunk, batch, recompute)
        return self._forward.of_all(critic(hidden), batch)

    def step(self, norms: Mapping[str, float]) -> dict[str, float]:
        """Change the weights by the gradients that wait, whose norms over all ranks these are; the learning rates."""
        rates = {name: optimizer.update(self._step, norms[name]) for name, optimizer in self._optimizers.items()}
        self._step += 1
        self.forget()
        return rates

    def forget(self) -> None:
        """Drops the gradients of policy and critic."""
        for optimizer in self._optimizers.values():
            optimizer.forget()
        for parameters in self._models.trained.values():
            for parameter in parameters.values():
                parameter.grad = None

    # --- weights ------------------------------------------------------------------------------------------------

    def begin_weights(self) -> None:
        """Start to give the policy's weights, from the first one, in the number format of who samples."""
        self._stream = self.whole_weights(getattr(torch, self._published))

    def whole_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights by name, each gathered from all ranks, which must all ask for it; in this number format,
        and narrowed before they travel unless factors are added to them first."""
        policy = self._models.policy
        narrowed = None if policy.has_adapter else dtype
        for name, tensor in policy.weights(replace(self._whole, dtype=narrowed)):
            yield name, tensor.to(dtype or tensor.dtype)
            count_progress()

    @torch.no_grad()
    def next_weights(self) -> list[Weight]:
        """Some more of them, none when all were given; every rank makes them whole and the first one answers."""
        weights: list[Weight] = []
        size = 0
        for name, tensor in self._stream:
            size += tensor.nbytes
            if self._place.rank == 0:
                flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                weights.append((name, tensor.dtype, tuple(tensor.shape), flat))
            if size >= STREAM_BYTES:
                break
        return weights

    @torch.no_grad()
    def save_policy(self, folder: Path, base_model: str) -> None:
        """config.json and model.safetensors under `policy`, and peft's `policy_adapter`: written by the first rank."""
        model, first = self._models.policy, self._place.rank == 0
        stream = self.whole_weights()
        if first:
            write_stream(
                folder / "policy" / "model.safetensors", formats_of(self._models.kinds), stream, {"format": "pt"}
            )
            model.save_config(folder / "policy")
        else:
            for _ in stream:
                pass
        if model.has_adapter:
            factors = model.adapter_weights(self._whole)
            if first:
                model.save_adapter(folder / "policy_adapter", base_model, factors)

    # --- state --------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Copy this rank's part of the state aside and begin to write it; `save_done` tells when that is over."""
        tensors: dict[str, Tensor] = {}
        for name, parameters in self._models.trained.items():
            tensors.update({f"{name}.{key}": parameter.detach() for key, parameter in parameters.items()})
            for key, moment in self._optimizers[name].state().items():
                owner = parameters[key.rpartition(".")[0]]
                tensors[f"optimizer.{name}.{key}"] = shared_out_as(owner, moment) if moment.dim() else moment
        info = {"step": self._step, "optimizer": self._config.optimizer.value, **self._models.identity}
        try:
            self._saving = sharded_state.begin(folder, tensors, info, self._files)
        except OSError as error:
            raise StorageError(f"cannot write {folder}: {error.strerror or error}") from error

    def save_done(self) -> bool:
        """Whether what `save` began is written, by all; StorageError when it could not be."""
        if self._saving is None or not self._saving.done():
            return self._saving is None
        done, self._saving = self._saving, None
        if (error := done.exception()) is not None:
            raise StorageError(f"the learner's state was not written: {' '.join(str(error).split())[-300:]}")
        return True

    def load(self, folder: Path) -> int:
        """Go on from a saved state of any number of processes; returns its step."""
        info, mine = sharded_state.read_info(folder), self._models.identity
        if differing := differences({key: info.get(key) for key in mine}, mine):
            raise EngineError(f"the saved state is of another model: {'; '.join(differing)}")
        if (saved_optimizer := info.get("optimizer")) != self._config.optimizer.value:
            raise EngineError(
                f"the saved state is of learner.optimizer={saved_optimizer}, which several processes cannot read "
                f"(learner.optimizer={self._config.optimizer.value})"
            )
        kinds = sharded_state.kinds(folder)
        places = {
            f"{name}.{key}": p for name, parameters in self._models.trained.items() for key, p in parameters.items()
        }
        check_names(kinds, places, self._moment_shape)
        fresh: dict[str, Tensor] = {}
        for name, kind in kinds.items():
            owner = places[name if name in places else name.removeprefix("optimizer.").rpartition(".")[0]]
            counter = not kind.dim()
            fresh[name] = torch.empty_like(kind, device="cpu") if counter else shared_out_as(owner, _empty(owner))
        sharded_state.read_shards(folder, fresh, self._files)
        local = {name: local_part(tensor) for name, tensor in fresh.items()}
        for name, optimizer in self._optimizers.items():
            optimizer.load(below(local, f"{name}."), below(local, f"optimizer.{name}."))
        self._step = int(info["step"])
        return self._step

    def _moment_shape(self, name: str) -> torch.Size | None:
        """Of `optimizer.MODEL.NAME.KIND` in whole, None for what has no place here."""
        kind, model, moment = [*name.split(".", 2), "", ""][:3]
        key, _, what = moment.rpartition(".")
        owner = self._models.trained.get(model, {}).get(key) if kind == "optimizer" else None
        if owner is None or what not in ("exp_avg", "exp_avg_sq", "step"):
            return None
        return torch.Size(()) if what == "step" else owner.shape


def _mesh(device: str, size: int, replicas: int) -> DeviceMesh:
    """Copies of the state by the ranks that each is shared out over; where there is one copy, those ranks alone."""
    if replicas == 1:
        return init_device_mesh(device, (size,))
    return init_device_mesh(device, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def _context(size: int, timeout: timedelta) -> ContextGroup | None:
    """The ranks that share this one's passes: neighbours, which exchange the most."""
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size, timeout=timeout)  # type: ignore[no-untyped-call]
    host, _ = dist.new_subgroups(size, timeout=timeout, backend="gloo")  # type: ignore[no-untyped-call]
    return ContextGroup(group, host)


def _meeting(position: RankPlace, timeout: timedelta) -> Store:
    """Where the ranks of a group find each other."""
    kind, _, where = position.rendezvous.partition("://")
    if kind == "file":
        return FileStore(where, position.size)
    host, _, port = where.rpartition(":")
    return TCPStore(host.strip("[]"), int(port), None, False, timeout)  # it is served on the first rank's machine


def _empty(parameter: Tensor) -> Tensor:
    return torch.empty_like(local_part(parameter))


def _numpy(tensor: Tensor) -> Floats:
    array: Floats = tensor.float().cpu().numpy()
    return array
