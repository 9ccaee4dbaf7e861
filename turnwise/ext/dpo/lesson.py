"""The updates of direct preference optimisation, made with the learner's likelihoods of whole episodes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.config import Config
from turnwise.config.choices import Aggregation
from turnwise.config.sections import section, value_of
from turnwise.engines.learners.learner import Learner, NotFinite, Objective, Supervised, Who
from turnwise.errors import ConfigError, DataError, TurnwiseError
from turnwise.ext.dpo.config import DpoConfig
from turnwise.ext.dpo.pairs import CHOSEN, REJECTED
from turnwise.training.packing import fill, pack, tokens_by_trajectory, write
from turnwise.training.sequences import TrainSequence, to_sequences
from turnwise.training.sft import SftStep
from turnwise.types import Group, Trajectory

SUMS = Objective(loss=Supervised.NLL.value, aggregation=Aggregation.sequence_mean_token_sum)
"""The weighted log-probs of each episode added up, mean over the episodes."""
OTHERS = ("sft.recorded", "conversations.files")


@dataclass(frozen=True, slots=True)
class _Preference:
    """What the pairs of a batch say: arrays [P] by the number of the pair."""

    pairs: NDArray[np.int64]
    gains: NDArray[np.float64]
    """[P, 2] by how much each side is likelier than at the start: log-probs, chosen and rejected."""

    def margins(self, beta: float) -> NDArray[np.float64]:
        return beta * (self.gains[:, CHOSEN] - self.gains[:, REJECTED])


class Preferences:
    """Makes the chosen episode of a pair likelier than the rejected one, measured from where training started.

    The loss of a pair is -log sigmoid(margin), margin = beta * (gain of the chosen - gain of the rejected). Its
    gradient is that of both log-probs times beta * sigmoid(-margin): numbers that are known once the pair is scored, so
    that either side can be worked off in any part of the batch.
    """

    def __init__(self, config: Config) -> None:
        self._beta = section(config, DpoConfig).beta
        for key in OTHERS:
            if value_of(config, key):
                raise ConfigError(f"{key} has no pairs: it cannot be learned together with dpo.files or dpo.recorded")

    def sequences(self, trajectories: Sequence[Trajectory]) -> list[TrainSequence]:
        """Those of both sides of every pair, as one group; an episode without its other side is refused."""
        sides = [trajectory.sibling for trajectory in trajectories]
        if sides != [CHOSEN, REJECTED] * (len(sides) // 2):
            raise DataError("these are no pairs of episodes, chosen and rejected in turn")
        halves = zip(trajectories[::2], trajectories[1::2], strict=True)
        made = to_sequences([Group(chosen.sample, [chosen, rejected]) for chosen, rejected in halves])
        if len({sequence.trajectory for sequence in made}) < len(trajectories):
            raise DataError("an episode of a pair has no token to learn")
        return made

    def prepare(self, learner: Learner, sequences: Sequence[TrainSequence], token_budget: int | None) -> None:
        """How likely every token is before training: what the gains are measured from."""
        _score(learner, sequences, token_budget, "ref_logprobs")

    def learn(self, learner: Learner, batch: Sequence[TrainSequence], token_budget: int | None) -> SftStep:
        """One update by the mean over the batch's pairs."""
        started, whole = time.perf_counter(), tokens_by_trajectory(batch)
        _score(learner, batch, token_budget, "new_logprobs")
        preference = _compare(batch)
        margins = preference.margins(self._beta)
        # the learner's mean is over episodes, of which a pair has two
        pulls = 2 * self._beta * np.exp(-np.logaddexp(0, margins))
        pull_of = dict(zip(preference.pairs.tolist(), pulls.tolist(), strict=True))
        for sequence in batch:
            sign = 1.0 if sequence.trajectory % 2 == CHOSEN else -1.0
            sequence.write("weights", np.full(sequence.policy_tokens, sign * pull_of[sequence.group]))
        try:
            parts = fill(batch, token_budget or learner.token_budget)
            done = learner.update([pack(part, whole) for part in parts], SUMS)
        except NotFinite as error:
            raise TurnwiseError(f"{error}; lower sft.lr") from error
        chosen, rejected = (self._beta * preference.gains.mean(axis=0)).tolist()
        measured = {
            "dpo/accuracy": float((margins > 0).mean()),
            "dpo/margin": float(margins.mean()),
            "dpo/chosen_reward": chosen,
            "dpo/rejected_reward": rejected,
        }
        return SftStep(
            loss=float(np.logaddexp(0, -margins).mean()),
            lr=done.metrics["lr"],
            grad_norm=done.metrics["grad_norm"],
            tokens=sum(len(sequence.token_ids) for sequence in batch),
            policy_tokens=sum(whole.values()),
            seconds=time.perf_counter() - started,
            measured=measured,
        )


def _score(learner: Learner, sequences: Sequence[TrainSequence], token_budget: int | None, name: str) -> None:
    whole = tokens_by_trajectory(sequences)
    for part in fill(sequences, token_budget or learner.token_budget):
        write(part, name, learner.score(pack(part, whole), Who.POLICY))


def _compare(batch: Sequence[TrainSequence]) -> _Preference:
    gains: dict[int, list[float]] = {}
    for sequence in batch:
        sides = gains.setdefault(sequence.group, [0.0, 0.0])
        sides[sequence.trajectory % 2] += float(
            (sequence.gather("new_logprobs") - sequence.gather("ref_logprobs")).sum()
        )
    return _Preference(np.array(list(gains)), np.array(list(gains.values())))
