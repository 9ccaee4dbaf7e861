"""Two recordings of one episode side by side: where their tokens part, and what each turn said on either side."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text as Styled

from turnwise.storage.transcript import visible
from turnwise.types import Message, Role, Trajectory, Turn

CONTEXT = 2
"""Equal lines shown before and after a change."""


@dataclass(frozen=True, slots=True)
class TokenPosition:
    """The first token that is another one: `TokenPosition(segment=0, token=57, turn=1)`."""

    segment: int
    token: int
    turn: int


@dataclass(frozen=True, slots=True)
class TurnText:
    """What was said in one turn by somebody, before and after; None where it was not said at all."""

    turn: int
    who: str
    before: str | None
    after: str | None

    @property
    def same(self) -> bool:
        """Whether it is the same, to the letter."""
        return self.before == self.after


@dataclass(frozen=True, slots=True)
class Differences:
    """How a second recording differs from a first."""

    parted: TokenPosition | None
    """None when all tokens are the same."""
    logprob_gap: float
    """The largest, over the policy's tokens before they part."""
    said: tuple[TurnText, ...]
    rewards: tuple[float | None, float | None]
    stop_reasons: tuple[str, str]

    @property
    def same_tokens(self) -> bool:
        """Whether both have the same tokens, all of them."""
        return self.parted is None

    def as_json(self) -> dict[str, Any]:
        """For a file and for the board."""
        texts = [asdict(entry) | {"same": entry.same} for entry in self.said]
        return asdict(self) | {"said": texts, "same_tokens": self.same_tokens}


def differences(before: Trajectory, after: Trajectory) -> Differences:
    """What differs, turn by turn and token by token."""
    parted, gap = _parted(before, after)
    texts: list[TurnText] = []
    for number in range(max(len(before.turns), len(after.turns))):
        old, new = (side.turns[number] if number < len(side.turns) else None for side in (before, after))
        texts.extend(_said(number, old, new))
    return Differences(
        parted, gap, tuple(texts), (before.reward, after.reward), (before.stop_reason.value, after.stop_reason.value)
    )


def _parted(before: Trajectory, after: Trajectory) -> tuple[TokenPosition | None, float]:
    gap = 0.0
    for number in range(max(len(before.segments), len(after.segments))):
        if number >= min(len(before.segments), len(after.segments)):
            ledger = (before.segments + after.segments)[-1] if number else None
            return TokenPosition(number, 0, int(ledger.turns[0]) if ledger is not None and len(ledger) else 0), gap
        old, new = before.segments[number], after.segments[number]
        common = min(len(old), len(new))
        unequal = np.flatnonzero(old.token_ids[:common] != new.token_ids[:common])
        end = int(unequal[0]) if len(unequal) else common
        if end:
            gap = max(gap, float(np.max(np.abs(old.logprobs[:end] - new.logprobs[:end]))))
        if len(unequal) or len(old) != len(new):
            longer = new if len(new) > end else old
            return TokenPosition(number, end, int(longer.turns[end])), gap
    return None, gap


def _said(number: int, old: Turn | None, new: Turn | None) -> Iterator[TurnText]:
    texts = [turn.message.text if turn is not None else None for turn in (old, new)]
    yield TurnText(number, Role.ASSISTANT.value, *texts)
    replies: list[Sequence[Message]] = [turn.replies if turn is not None else () for turn in (old, new)]
    for at in range(max(map(len, replies))):
        sides = [side[at] if at < len(side) else None for side in replies]
        who = next(side.role.value for side in sides if side is not None)
        yield TurnText(number, who, *(side.text if side is not None else None for side in sides))


def shown(result: Differences) -> Group:
    """The differences for a terminal; nothing of a text can move its cursor."""
    lines: list[Styled] = []
    if result.parted is None:
        gap = f"; log-probs differ by at most {result.logprob_gap:.2g}" if result.logprob_gap else " and log-probs"
        lines.append(Styled(f"the same tokens{gap}", style="bold green"))
    else:
        parted = result.parted
        where = f"segment {parted.segment}, token {parted.token}, turn {parted.turn}"
        lines.append(Styled(f"the tokens differ from {where} on", style="bold yellow"))
    for entry in result.said:
        if entry.same:
            continue
        lines.append(Styled(f"\nturn {entry.turn}, {entry.who}", style="bold"))
        lines += _diff((entry.before or "").splitlines(), (entry.after or "").splitlines())
    for name, (old, new) in (("reward", result.rewards), ("ended", result.stop_reasons)):
        lines.append(Styled(f"\n{name}: {_word(old)}" + ("" if old == new else f" -> {_word(new)}"), style="bold"))
    return Group(*lines)


def _diff(before: list[str], after: list[str]) -> Iterator[Styled]:
    styles = {"+": "green", "-": "red"}
    for line in list(difflib.unified_diff(before, after, lineterm="", n=CONTEXT))[2:]:
        if not line.startswith("@@"):
            yield Styled(visible(line), style=styles.get(line[:1], "dim"))


def _word(value: float | str | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else value
