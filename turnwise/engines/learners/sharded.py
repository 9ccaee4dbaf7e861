"""The learner of several processes: deals every minibatch out over ranks that share weights, gradients and moments."""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.engines.learners.device_batch import check
from turnwise.engines.learners.learner import Floats, NotFinite, TokenOutputs, UpdateResult, Who
from turnwise.engines.learners.losses import MEANS
from turnwise.engines.learners.objective import Objective
from turnwise.engines.learners.rank import Accumulated, Weight
from turnwise.engines.learners.rank_group import RankLost, Ranks
from turnwise.engines.learners.rank_setup import RankSetup
from turnwise.engines.learners.sharing import Shares, deal, laid_out
from turnwise.engines.learners.token_batch import TokenBatch
from turnwise.engines.model.policy_folder import PolicyFolder
from turnwise.engines.updates import FullWeights
from turnwise.errors import EngineError, TurnwiseError

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
            self._blind: str | None = self._all("blind")[0]
        except BaseException:
            ranks.stop()
            raise

    def _all(self, method: str, *given: Any) -> list[Any]:
        """The same call to every rank."""
        return self._call(method, [given] * self._ranks.size)

    def _dealt(self, method: str, shares: Shares, *given: Any) -> list[Any]:
        """A call to every rank with its own passes."""
        passes = [[None if share is None else share.batch for share in mine] for mine in shares]
        return self._call(method, [(mine, *given) for mine in passes])

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            return self._ranks.call(method, arguments)
        except RankLost as lost:
            if self._saving:
                self._saving, self._torn = False, "; the checkpoint it was writing is lost, those before it are whole"
            raise RankLost(f"{lost}{self._torn}") from lost

    @property
    def token_budget(self) -> int:
        """Tokens that all ranks together have room for in a pass each."""
        return self._ranks.size * self._rank_budget()

    def _rank_budget(self) -> int:
        return self._setup.learner.token_budget or min(self._all("token_budget"))

    def score(self, batch: TokenBatch, who: Who) -> Floats:
        """One number [N] for every policy token, without gradient."""
        if who is Who.SAMPLER:
            raise EngineError("the sampler's own arithmetic is proven for one process: learner.processes=1 has it")
        if who is Who.CRITIC and not self._setup.critic:
            raise EngineError("this learner has no critic")
        if who is Who.REFERENCE and not self._setup.reference:
            raise EngineError("this learner was not asked to keep a reference")
        self._check(batch)
        shares = deal([batch], self._ranks.size, self._rank_budget())
        return laid_out(self._dealt("score", shares, who), shares, [batch])[0]

    def _check(self, batch: TokenBatch) -> None:
        """Before any rank waits for another in a collective."""
        check(batch)
        if batch.media and self._blind is not None:
            raise EngineError(f"there are images in this batch: {self._blind}")
        if batch.media and self._setup.critic and not self._setup.learner.shared_critic:
            # Its tower is gathered inside its own pass, and images are looked at before one.
            raise EngineError(
                "a critic with a trunk of its own sees no images over several processes: set "
                "learner.shared_critic=true or learner.processes=1"
            )

    def update(self, batches: Sequence[TokenBatch], objective: Objective) -> UpdateResult:
        """One optimizer step on the micro-batches of a minibatch, dealt out anew."""
        if not batches:
            raise EngineError("an update needs a batch")
        for batch in batches:
            self._check(batch)
        shares = deal(batches, self._ranks.size, self._rank_budget())
        found: list[Accumulated] = self._dealt("accumulate", shares, objective)
        try:
            metrics = self._metrics(found, batches)
            norms = {name: math.sqrt(sum(one.squares[name] for one in found)) for name in found[0].squares}
            self._refuse(norms, found)
        except BaseException:
            self._all("forget")
            raise
        rates: dict[str, float] = self._all("step", norms)[0]
        self.step += 1
        for name, norm in norms.items():
            prefix = "" if name == "policy" else f"{name}_"
            metrics |= {f"{prefix}grad_norm": norm, f"{prefix}lr": rates[name]}
        arrays = (
            laid_out([getattr(one, name) for one in found], shares, batches) for name in ("logprobs", "entropies")
        )
        return UpdateResult([TokenOutputs(*pair) for pair in zip(*arrays, strict=True)], metrics)

    def _metrics(self, found: Sequence[Accumulated], batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Shares of the ranks' passes added up; every loss must be finite."""
        for rank, one in enumerate(found):
            if one.error is not None:
                one.error.throw(rank)
        losses = [loss for one in found for loss in one.losses]
        for loss in losses:
            if not math.isfinite(loss):
                raise NotFinite(f"the loss is {loss} after {self.step} steps")
        counted = batches[0].minibatch_tokens / sum(len(batch.index) for batch in batches)
        shares = [metrics for one in found for metrics in one.metrics]
        totals = {
            name: sum(share[name] for share in shares) * (counted if name in MEANS else 1.0) for name in shares[0]
        }
        return totals | {"loss": sum(losses)}

    def _refuse(self, norms: dict[str, float], found: Sequence[Accumulated]) -> None:
        for name, norm in norms.items():
            if not math.isfinite(norm):
                places = sorted({place for one in found for place in one.broken[name]})
                where = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
                raise NotFinite(f"the {name}'s gradient has norm {norm} after {self.step} steps; not finite: {where}")

    def weights(self) -> FullWeights:
        """The policy's weights, an adapter merged; each is gathered when it is asked for."""
        return FullWeights(self._shapes, self._stream())

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        self._all("begin_weights")
        while some := self._all("next_weights")[0]:
            yield from map(_tensor, some)

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
