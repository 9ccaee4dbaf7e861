"""`turnwise sft --dry-run`: the first conversations token by token, those that are learned set apart."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.text import Text

from turnwise.storage.transcript import visible
from turnwise.types import Ledger, Trajectory

LEARNED = ("black on green", "black on bright_green")
"""In turn, so that each token can be told from the next."""
MARKS = ("\u00ab", "\u00bb")
"""Around a token that is learned: also where there are no colours."""


@dataclass(frozen=True, slots=True)
class LearnedTokens:
    """What a fine-tuning would learn from: `heading` counts all of it, `first` are its first conversations."""

    heading: str
    plan: str
    first: Sequence[Trajectory]
    decode: Callable[[Sequence[int] | NDArray[np.int64]], str]

    def __rich__(self) -> Group:
        key = Text.assemble("tokens in ", *_token("marks", 0), " are learned, all others are only read")
        return Group(Text(self.heading), Text(self.plan), key, *self._conversations(), Text("nothing was written"))

    def as_json(self) -> dict[str, Any]:
        """The same as values that JSON can hold."""
        rows = [
            {
                "sample": trajectory.sample.id,
                "segments": [
                    {
                        "tokens": [self.decode([token]) for token in ledger.token_ids.tolist()],
                        "learned": ledger.loss_mask.tolist(),
                    }
                    for ledger in trajectory.segments
                ],
            }
            for trajectory in self.first
        ]
        return {"heading": self.heading, "plan": self.plan, "first": rows}

    def _conversations(self) -> Iterator[Text]:
        for trajectory in self.first:
            for number, ledger in enumerate(trajectory.segments):
                part = f", segment {number}" if len(trajectory.segments) > 1 else ""
                learned = int(ledger.loss_mask.sum())
                title = f"\n{trajectory.sample.id}{part}: {learned} of {len(ledger)} tokens are learned"
                yield Text(visible(title), style="bold")
                yield self._tokens(ledger)

    def _tokens(self, ledger: Ledger) -> Text:
        """Runs of tokens that are only read are decoded as a whole: one letter may take several tokens."""
        text, mask = Text(), ledger.loss_mask
        starts = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ledger)]
        for start, end in pairwise(starts):
            ids = ledger.token_ids[start:end]
            if not mask[start]:
                text.append(visible(self.decode(ids)), style="dim")
                continue
            for number, token in enumerate(ids.tolist()):
                for piece, style in _token(self.decode([token]), number):
                    text.append(piece, style=style)
        return text


def _token(token: str, number: int) -> list[tuple[str, str]]:
    return [(MARKS[0], "dim"), (visible(token), LEARNED[number % 2]), (MARKS[1], "dim")]
