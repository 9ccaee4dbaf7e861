"""The learner of several processes: deals every minibatch out over ranks that share weights, gradients and moments."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from turnwise.engines.learners.device_batch import PER_TOKEN, check
from turnwise.engines.learners.learner import (
    Floats,
    Ints,
    NotFinite,
    Objective,
    TokenBatch,
    TokenOutputs,
    UpdateResult,
    Who,
)
from turnwise.engines.learners.losses import MEANS
from turnwise.engines.learners.process_group import LearnerLost
from turnwise.engines.learners.splitting import BatchPart, chosen, owners_of, whole
from turnwise.engines.model.policy_folder import PolicyFolder
from turnwise.engines.weight_updates import FullWeights
from turnwise.errors import EngineError, TurnwiseError
from turnwise.ext.fsdp.rank import RankResults, Weight
from turnwise.ext.fsdp.rank_group import Ranks, rank_names
from turnwise.ext.fsdp.rank_setup import RankSetup

T = TypeVar("T")
ARRAYS = PER_TOKEN


@dataclass(frozen=True, slots=True, eq=False)
class RankShare:
    """What one rank computes in one pass."""

    batch: TokenBatch
    places: Ints
    """[n] which of the policy tokens of all batches, end to end, these are."""


Shares = list[list[RankShare | None]]
"""By rank and pass; None where a rank has nothing left and only joins in."""


def deal(batches: Sequence[TokenBatch], ranks: int, token_budget: int) -> Shares:
    """Every trajectory to one rank and one pass; a pass has at most `token_budget` tokens unless a single one has more.

    A function of the batches alone: largest first, each to the rank that has the fewest tokens so far.
    """
    owners = [owners_of(batch) for batch in batches]
    units: list[tuple[int, int, int]] = []
    """Tokens, batch and trajectory of each."""
    for number, (batch, (of, order)) in enumerate(zip(batches, owners, strict=True)):
        sizes = np.bincount(of[of >= 0], weights=batch.lengths[of >= 0])
        units += [(int(sizes[trajectory]), number, int(trajectory)) for trajectory in order]
    own: list[list[list[tuple[int, int]]]] = [[] for _ in range(ranks)]
    room: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for size, number, trajectory in sorted(units, key=lambda unit: -unit[0]):
        rank = load.index(min(load))
        load[rank] += size
        fitting = next((index for index, left in enumerate(room[rank]) if size <= left), None)
        if fitting is None:
            own[rank].append([(number, trajectory)])
            room[rank].append(token_budget - size)
        else:
            own[rank][fitting].append((number, trajectory))
            room[rank][fitting] -= size
    starts = np.cumsum([0, *(len(batch.index) for batch in batches)])

    def share(share_units: list[tuple[int, int]]) -> RankShare:
        parts: list[BatchPart] = []
        for number in sorted({number for number, _ in share_units}):
            wanted = np.array(sorted(trajectory for home, trajectory in share_units if home == number))
            part = chosen(whole(batches[number]), owners[number][0], wanted)
            parts.append(BatchPart(part.batch, part.places + starts[number]))
        return _joined(parts)

    passes = max(map(len, own))
    return [[share(share_units) for share_units in mine] + [None] * (passes - len(mine)) for mine in own]


def laid_out(results: Sequence[Sequence[Floats]], shares: Shares, batches: Sequence[TokenBatch]) -> list[Floats]:
    """What the ranks found in their passes, as one array for each batch."""
    every = np.zeros(sum(len(batch.index) for batch in batches), np.float32)
    for mine, arrays in zip(shares, results, strict=True):
        for share, array in zip(mine, arrays, strict=True):
            if share is not None:
                every[share.places] = array
    return np.split(every, np.cumsum([len(batch.index) for batch in batches])[:-1])


def _joined(parts: Sequence[BatchPart]) -> RankShare:
    """Parts of one minibatch end to end."""
    batches = [part.batch for part in parts]
    first = batches[0]
    counts = {(piece.minibatch_tokens, piece.minibatch_trajectories) for piece in batches}
    lacking = [name for name in ARRAYS if len({getattr(piece, name) is None for piece in batches}) > 1]
    if len(counts) > 1 or lacking:
        raise EngineError(f"batches of one update differ in {', '.join(lacking) or 'the size of their minibatch'}")
    tokens = np.cumsum([0, *(len(piece.tokens) for piece in batches)])
    owners = np.cumsum([0, *(len(piece.trajectory_tokens) for piece in batches)])

    arrays: dict[str, Any] = {
        name: None if getattr(first, name) is None else np.concatenate([getattr(piece, name) for piece in batches])
        for name in ARRAYS
    }
    batch = TokenBatch(
        tokens=np.concatenate([piece.tokens for piece in batches]),
        lengths=np.concatenate([piece.lengths for piece in batches]),
        index=np.concatenate([piece.index + start for piece, start in zip(batches, tokens, strict=False)]),
        trajectory=np.concatenate([piece.trajectory + start for piece, start in zip(batches, owners, strict=False)]),
        trajectory_tokens=np.concatenate([piece.trajectory_tokens for piece in batches]),
        minibatch_tokens=first.minibatch_tokens,
        minibatch_trajectories=first.minibatch_trajectories,
        media=tuple(span.shifted(int(by)) for piece, by in zip(batches, tokens, strict=False) for span in piece.media),
        **arrays,
    )
    return RankShare(batch, np.concatenate([part.places for part in parts]))


POLL_SECONDS = 0.05
"""How often a save under way is asked about."""


class ShardedLearner:
    """Trains a policy over the ranks of a group, which it starts and ends. Implements `Learner`.

    Scores and gradients are those of one process up to rounding.
    """

    device = torch.device("cpu")
    """Nothing is computed in this process."""

    def __init__(
        self, ranks: Ranks, setup: RankSetup, *, companions: PolicyFolder | None = None, base_model: str = ""
    ) -> None:
        self._ranks, self._setup = ranks, setup
        self._companions, self._base_model = companions or PolicyFolder({}), base_model
        self.step = 0
        """How many times the weights have changed."""
        self._saving, self._torn = False, ""
        ranks.start(setup)
        try:
            self._shapes: dict[str, tuple[int, ...]] = self._all("shapes")[0]
            self._text_only: str | None = self._all("text_only")[0]
        except BaseException:
            ranks.stop()
            raise

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Makes the same call to every rank and returns their answers."""
        return self._call(method, [arguments] * self._ranks.size)

    def _deal(self, batches: Sequence[TokenBatch]) -> Shares:
        """Passes of the ranks, or of those that share them."""
        together = self._setup.context
        return deal(batches, self._ranks.size // together, together * self._rank_budget())

    def _dealt(self, method: str, shares: Shares, *given: Any) -> list[Any]:
        """A call to every rank with its own passes."""
        passes = [[None if share is None else share.batch for share in mine] for mine in shares]
        return self._call(method, [(mine, *given) for mine in passes for _ in range(self._setup.context)])

    def _firsts(self, results: list[T]) -> list[T]:
        """Of ranks that share their passes the first one's: the others have the same."""
        return results[:: self._setup.context]

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            return self._ranks.call(method, arguments)
        except LearnerLost as lost:
            if self._saving:
                self._saving, self._torn = False, "; the checkpoint it was writing is lost, those before it are whole"
            raise LearnerLost(f"{lost}{self._torn}") from lost

    @property
    def token_budget(self) -> int:
        """Tokens that all ranks together have room for in a pass each."""
        return self._ranks.size * self._rank_budget()

    def _rank_budget(self) -> int:
        return self._setup.learner.token_budget or min(self._all("token_budget"))

    def score(self, batch: TokenBatch, who: Who) -> Floats:
        """One number [N] for every policy token, without gradient."""
        if who is Who.SAMPLER:
            raise EngineError("exact log-probs are proven for one process only: set learner.processes=1")
        if who is Who.CRITIC and not self._setup.critic:
            raise EngineError("this learner has no critic")
        if who is Who.REFERENCE and not self._setup.reference:
            raise EngineError("this learner has no reference policy")
        self._check(batch)
        shares = self._deal([batch])
        return laid_out(self._firsts(self._dealt("score", shares, who)), shares, [batch])[0]

    def _check(self, batch: TokenBatch) -> None:
        """Before any rank waits for another in a collective."""
        check(batch)
        if batch.media and self._text_only is not None:
            raise EngineError(f"there are images in this batch: {self._text_only}")
        if batch.media and self._setup.critic and not self._setup.learner.shared_critic:
            # Its tower is gathered inside its own pass, and images are looked at before one.
            raise EngineError(
                "a critic with its own trunk cannot read images with several processes: set "
                "learner.shared_critic=true or learner.processes=1"
            )

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> UpdateResult:
        """One optimizer step on the micro-batches of a minibatch, dealt out anew."""
        if not batches:
            raise EngineError("an update needs a batch")
        for batch in batches:
            self._check(batch)
        shares = self._deal(batches)
        results: list[RankResults] = self._dealt("accumulate", shares, objective)
        firsts = self._firsts(results)
        try:
            metrics = self._metrics(results, batches)
            norms = self._norms(results)
            self._refuse(norms, results)
        except BaseException:
            self._all("forget")
            raise
        rates: dict[str, float] = self._all("step", norms)[0]
        self.step += 1
        for name, norm in norms.items():
            prefix = "" if name == "policy" else f"{name}_"
            metrics |= {f"{prefix}grad_norm": norm, f"{prefix}lr": rates[name]}
        arrays = (
            laid_out([getattr(result, name) for result in firsts], shares, batches)
            for name in ("logprobs", "entropies")
        )
        return UpdateResult([TokenOutputs(*pair) for pair in zip(*arrays, strict=True)], metrics)

    def _metrics(self, results: list[RankResults], batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Shares of the ranks' passes added up; every loss must be finite."""
        names = rank_names(self._ranks.size)
        for rank, result in enumerate(results):
            if result.error is not None:
                result.error.throw(names[rank])
        firsts = self._firsts(results)
        losses = [loss for result in firsts for loss in result.losses]
        for loss in losses:
            if not math.isfinite(loss):
                raise NotFinite(f"the loss is {loss} after {self.step} weight updates")
        counted = batches[0].minibatch_tokens / sum(len(batch.index) for batch in batches)
        shares = [metrics for result in firsts for metrics in result.metrics]
        totals = {
            name: sum(share[name] for share in shares) * (counted if name in MEANS else 1.0) for name in shares[0]
        }
        return totals | {"loss": sum(losses)}

    def _norms(self, results: Sequence[RankResults]) -> dict[str, float]:
        """Of the whole gradients, of which every copy of the state has all."""
        copy = results[: self._ranks.size // self._setup.replicas]
        return {name: math.sqrt(sum(result.squares[name] for result in copy)) for name in copy[0].squares}

    def _refuse(self, norms: dict[str, float], results: Sequence[RankResults]) -> None:
        for name, norm in norms.items():
            if not math.isfinite(norm):
                places = sorted({parameter for result in results for parameter in result.broken[name]})
                where = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
                raise NotFinite(f"the {name}'s gradient has norm {norm} after {self.step} updates; not finite: {where}")

    def weights(self) -> FullWeights:
        """The policy's weights, an adapter merged; each is gathered when it is asked for."""
        return FullWeights(self._shapes, self._stream())

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        self._all("begin_weights")
        while weights := self._all("next_weights")[0]:
            yield from map(_tensor, weights)

    def save(self, folder: Path) -> None:
        """Begin to write a torch distributed checkpoint of what is trained, the moments and the step.

        One that is still being written is waited for first. The files are whole when `saved` returns.
        """
        self.saved()
        folder.mkdir(parents=True, exist_ok=True)
        self._all("save", folder)
        self._saving = True

    @property
    def saving(self) -> bool:
        """Whether the last `save` still writes."""
        return self._saving

    def saved(self) -> None:
        """Wait until the last `save` is written, between the calls of others."""
        while self._saving:
            try:
                self._saving = not all(self._all("save_done"))
            except TurnwiseError:
                self._saving = False
                raise
            if self._saving:
                time.sleep(POLL_SECONDS)

    def load(self, folder: Path) -> None:
        """Go on from a saved state, of one process or of any number; one of another model is refused by name."""
        self.step = self._all("load", folder)[0]

    def save_policy(self, folder: Path) -> None:
        """`policy`, a Hugging Face folder, and peft's `policy_adapter` of a model that has an adapter."""
        self._all("save_policy", folder, self._base_model)
        self._companions.save_files(folder / "policy")

    def save_adapter(self, folder: Path) -> bool:
        """Not from here: samplers are given all weights, an adapter merged."""
        return False

    def close(self) -> None:
        """End the ranks, whatever they are doing; who wants a save to be whole waits for `saved` first."""
        self._ranks.stop()


def _tensor(weight: Weight) -> tuple[str, Tensor]:
    name, dtype, shape, flat = weight
    return name, torch.from_numpy(flat).view(dtype).reshape(shape)
