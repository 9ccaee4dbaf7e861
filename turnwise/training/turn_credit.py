"""Credit by turn: the tokens of each turn also answer for what scoring thought of that turn.

To the advantage of every policy token of turn t is added

    weight * (G_t - b),   G_t = s_t + gamma * G_(t+1),

where s_t is the turn's score, 0 for a turn without one, and b is the mean of G over all turns of the *other* siblings.
The turns of a branch follow one another and none of another conversation.

Why this b, and why on every turn. A baseline leaves the expected gradient alone when it does not depend on the actions
whose log-probs it multiplies: E[b * grad log p(trajectory)] = E[b] * grad 1 = 0. The policy itself decides how many
turns there are, and that breaks the two usual baselines:

- The mean (or mean and deviation) over those that reached turn t, the trajectory itself among them, changes with its
  own decision to go on.
- A baseline taken off scored turns only is taken off or not by the policy's own choice between a tool call and an
  answer. What remains is -E[b] * grad E[number of scored turns], a push against tool use, or towards it where scores
  are negative.

Here b is made of the siblings alone, who were drawn independently, and one number is taken off all tokens of the
trajectory, the final answer's included. So the expected gradient is the exact one: with gamma 1 of
E[reward + weight * sum of the scores], with gamma 0 of the same with each turn answering for its own score only.
That the sum grows with the number of scored turns is part of that objective: what a needless call costs is for the
scorer to say (a score below 0), not for a baseline to hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.training.advantages import returns_to_go
from turnwise.training.packing import gather
from turnwise.training.sequences import LEFT_OUT, Floats, Ints, TrainSequence


@dataclass(frozen=True, slots=True)
class _Scored:
    """One trajectory: its sequences, the turns the policy wrote in and what each of them answers for."""

    sequences: list[TrainSequence]
    turns: Ints
    returns: Floats


def add_turn_credit(sequences: Sequence[TrainSequence], weight: float, gamma: float = 0.0) -> dict[str, float]:
    """Add each turn's credit to the advantages, which `assign` has written; returns metrics.

    A trajectory without siblings has nothing to be compared with and gets none. Tokens the policy did not write stay
    exactly 0.
    """
    groups: dict[int, dict[int, list[TrainSequence]]] = {}
    for sequence in sequences:
        if sequence.group != LEFT_OUT:
            groups.setdefault(sequence.group, {}).setdefault(sequence.trajectory, []).append(sequence)
    for by_trajectory in groups.values():
        siblings = [_scored(parts, gamma) for parts in by_trajectory.values()]
        total, turns = (
            sum(sibling.returns.sum() for sibling in siblings),
            sum(len(sibling.turns) for sibling in siblings),
        )
        for sibling in siblings if len(siblings) > 1 else ():
            baseline = (total - sibling.returns.sum()) / (turns - len(sibling.turns))
            _add(sibling, weight * (sibling.returns - baseline))
    scores = [score for group in groups.values() for parts in group.values() for score in parts[0].turn_scores.values()]
    return {
        "turn_credit/scored_turns": float(len(scores)),
        "turn_credit/score_mean": sum(scores) / max(1, len(scores)),
    }


def _scored(sequences: list[TrainSequence], gamma: float) -> _Scored:
    scores = sequences[0].turn_scores
    if any(sequence.turn_scores != scores for sequence in sequences):
        raise ValueError(f"the sequences of trajectory {sequences[0].trajectory} differ in their turn scores")
    # Turns are counted through the conversations, so that one after the other they are in order.
    by_branch = [[s for s in sequences if s.branch == branch] for branch in sorted({s.branch for s in sequences})]
    turns = [np.unique(gather(part, "turns")) for part in by_branch]
    returns = [returns_to_go([scores.get(turn, 0.0) for turn in part.tolist()], gamma) for part in turns]
    return _Scored(sequences, np.concatenate(turns), np.concatenate(returns))


def _add(scored: _Scored, credit: Floats) -> None:
    for sequence in scored.sequences:
        here = credit[np.searchsorted(scored.turns, sequence.gather("turns"))]
        sequence.write("advantages", sequence.gather("advantages") + here)
