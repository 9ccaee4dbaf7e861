"""What several episodes of one sample say together: pass@k, pass^k, maj@k and avg@k, each with its error."""

import itertools
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from turnwise.system.metrics import Share, share
from turnwise.types import Trajectory

REPEATED = ("pass@", "pass^", "maj@", "avg@")
DRAWS = 512
"""Subsets of k episodes that a majority is taken over, where there are more than so many."""
_MARKED = re.compile(r"####[ \t]*((?:(?!####)[^\n])+)|\\boxed\{([^{}]*)\}")

Answer = tuple[str, bool]
"""What an episode answered, and whether that was right."""


def pass_at_k(tries: int, right: int, k: int) -> float:
    """The chance that k of these tries, drawn without putting back, hold a right one: 1 - C(n-c, k) / C(n, k)."""
    if not 0 <= right <= tries or not 1 <= k <= tries:
        raise ValueError(f"pass@{k} of {right} right in {tries}")
    return 1.0 - math.comb(tries - right, k) / math.comb(tries, k)


def pass_all_k(tries: int, right: int, k: int) -> float:
    """pass^k, the chance that k of these tries, drawn without putting back, are all right: C(c, k) / C(n, k)."""
    return 1.0 - pass_at_k(tries, tries - right, k)


def majority_at_k(answers: Sequence[Answer], k: int) -> float:
    """maj@k, the chance that the answer given most often by k of these tries is right; a tie is drawn by lot."""
    votes = [_vote(drawn) for drawn in _draws(answers, k)]
    return math.fsum(votes) / len(votes)


def repeated_answers(trajectories: Iterable[Trajectory]) -> dict[str, Share]:
    """`pass@k`, `pass^k`, `maj@k` and `avg@k` of scored episodes, for k = 2, 4, 8 ... and the most that a sample has.

    Each is a mean over the samples with at least k scored episodes, of what is unbiased for each of them; nothing
    where no sample has two.
    """
    by_sample: dict[str, list[Answer]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.right is not None:
            by_sample[trajectory.sample.id].append((result_of(trajectory), trajectory.right))
    most = max(map(len, by_sample.values()), default=0)
    numbers: dict[str, Share | None] = {}
    for k in tries(most):
        enough = {sample: answers for sample, answers in by_sample.items() if len(answers) >= k}
        counts = [(sample, len(answers), sum(right for _, right in answers)) for sample, answers in enough.items()]
        of_samples = partial(share, episodes_behind=sum(n for _, n, _ in counts))
        numbers[f"pass@{k}"] = of_samples((sample, pass_at_k(n, right, k)) for sample, n, right in counts)
        numbers[f"pass^{k}"] = of_samples((sample, pass_all_k(n, right, k)) for sample, n, right in counts)
        numbers[f"maj@{k}"] = of_samples((sample, majority_at_k(answers, k)) for sample, answers in enough.items())
        numbers[f"avg@{k}"] = of_samples((sample, right / n) for sample, n, right in counts)
    return {name: number for name, number in numbers.items() if number is not None}


def tries(most: int) -> list[int]:
    """The k of these numbers where samples have so many episodes."""
    return [*(2**power for power in range(1, most.bit_length()) if 2**power < most), most] if most > 1 else []


def most_repeated(numbers: dict[str, Share]) -> dict[str, Share]:
    """The measures of the largest k, by name."""
    return dict(list(numbers.items())[-len(REPEATED) :])


def result_of(trajectory: Trajectory) -> str:
    """What the last answer comes to: behind `####`, inside \\boxed{}, else its last line; without case and spacing."""
    text = trajectory.answers[-1].visible.strip() if trajectory.answers else ""
    marked = _MARKED.findall(text)
    result = max(marked[-1]) if marked else text.rpartition("\n")[2]
    return " ".join(result.casefold().split())


def _draws(answers: Sequence[Answer], k: int) -> Iterator[Sequence[Answer]]:
    if math.comb(len(answers), k) <= DRAWS:
        yield from itertools.combinations(answers, k)
    else:
        lots = random.Random(0)  # the same numbers whenever an evaluation is read again
        yield from (lots.sample(answers, k) for _ in range(DRAWS))


def _vote(answers: Sequence[Answer]) -> float:
    rights: dict[str, list[bool]] = defaultdict(list)
    for text, right in answers:
        rights[text].append(right)
    most = max(map(len, rights.values()))
    return math.fsum(sum(votes) / most for votes in rights.values() if len(votes) == most) / sum(
        len(votes) == most for votes in rights.values()
    )
