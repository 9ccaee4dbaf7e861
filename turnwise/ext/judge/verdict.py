"""From a judge's reply to a verdict on the allowed grid, and from several votes to one."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.errors import ConfigError

SNAP = 0.01
"""How far a number may be from an allowed one: enough for 0.33 as a third, too little to take one for another."""
_LABEL = re.compile(
    r"(?:final\s+)?(?:score|verdict|answer|rating|grade|judge?ment)(?:\s*\([^()\n]{0,40}\))?\s*[:=]\s*", re.IGNORECASE
)
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,6}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})")
_DECORATION = " \t\r\n*_`\"'"
_WORDS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}


@dataclass(frozen=True, slots=True)
class VerdictScale:
    """The allowed verdicts: `VerdictScale((0.0, 0.5, 1.0))`; `words` means that the judge says TRUE or FALSE."""

    values: tuple[float, ...]
    words: bool = False

    def __post_init__(self) -> None:
        ordered = sorted(self.values)
        if len(ordered) < 2 or any(after - before <= 2 * SNAP for before, after in itertools.pairwise(ordered)):
            raise ConfigError(
                f"judge: the grid {list(self.values)} needs two or more values, more than {2 * SNAP} apart"
            )
        if self.words and set(self.values) != {0.0, 1.0}:
            raise ConfigError(f"judge: words stand for 0 and 1, not for {list(self.values)}")

    @property
    def allowed(self) -> str:
        """The replies a judge may give: `0, 0.25, 0.5, 0.75, 1`."""
        return "TRUE, FALSE" if self.words else ", ".join(f"{value:g}" for value in sorted(self.values))

    def snap(self, number: float) -> float | None:
        """The allowed value this number stands for; None when it is none of them."""
        near = min(self.values, key=lambda value: abs(value - number))
        return near if abs(near - number) <= SNAP else None

    def nearest(self, number: float) -> float:
        """The allowed value closest to any number."""
        return min(self.values, key=lambda value: abs(value - number))

    def parse(self, reply: str, *, explained: bool = False) -> float | None:
        """The verdict that a reply consists of, or with a reason before it ends with; None for anything else.

        `0.75`, `**Score: 0.75**` and `Score (0-1): .75` are verdicts. A sentence with a number in it is not: which of
        its numbers is meant would be a guess.
        """
        text = reply.rpartition("</think>")[2].strip(_DECORATION)
        if explained:
            text = text.rpartition("\n")[2].strip(_DECORATION)
        label = _LABEL.match(text)
        if label is not None:
            text = text[label.end() :]
        text = text.strip(_DECORATION).removesuffix(".").rstrip(_DECORATION)
        if text.lower() in _WORDS:
            return _WORDS[text.lower()] if self.words else None
        return self.snap(float(text)) if _NUMBER.fullmatch(text) else None


BINARY = VerdictScale((0.0, 1.0), words=True)
QUARTERS = VerdictScale((0.0, 0.25, 0.5, 0.75, 1.0))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge decided, with each vote and the words it came in."""

    value: float
    votes: tuple[float, ...] = ()
    replies: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """All that was written, vote by vote."""
        if len(self.replies) < 2:
            return "".join(self.replies).strip()
        return "\n".join(f"vote {number}: {reply.strip()}" for number, reply in enumerate(self.replies, start=1))

    @property
    def agreement(self) -> float:
        """The share of votes equal to the verdict."""
        return self.votes.count(self.value) / len(self.votes)


def majority(votes: Sequence[float]) -> float:
    """The value of more than half of the votes, else the middle one, which is on the grid as the number is odd."""
    if len(votes) % 2 == 0:
        raise ValueError(f"{len(votes)} votes have no middle")
    value, count = Counter(votes).most_common(1)[0]
    return value if 2 * count > len(votes) else sorted(votes)[len(votes) // 2]
