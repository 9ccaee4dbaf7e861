"""Recorded tokens walked along one full render: what the policy's own words do not explain is a fault of the record."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from turnwise.chat.control_tokens import shared
from turnwise.types import Ledger, Origin, StopReason, Trajectory

SHOWN = 60


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of a ledger that the policy wrote in one turn, or that stand between two such turns."""

    start: int
    ids: list[int]
    turn: int
    policy: bool


def token_spans(ledger: Ledger) -> Iterator[TokenSpan]:
    """The ledger as policy, not policy, policy, ..."""
    start, context = 0, TokenSpan(0, [], 0, policy=False)
    for origin, turn, ids in ledger.spans():
        if origin is Origin.POLICY:
            if context.ids:
                yield context
            yield TokenSpan(start, ids.tolist(), turn, policy=True)
            context = TokenSpan(start + len(ids), [], turn, policy=False)
        else:
            context.ids.extend(ids.tolist())
        start += len(ids)
    if context.ids:
        yield context


@dataclass(slots=True)
class Walk:
    """Where a full render has been followed to. White space beside the policy's words is not held against it: many
    templates trim them."""

    rendered: str
    place: int = 0

    def pass_given(self, text: str) -> str | None:
        """Go past what the template, a tool or a user wrote; where it is not what was rendered, say so."""
        self._skip_space()
        words = text.strip()
        if self.rendered.startswith(words, self.place):
            self.place += len(words)
            return None
        here = self.rendered[self.place : self.place + len(words) + SHOWN]
        at = max(shared(words, here) - SHOWN // 3, 0)
        return f"recorded is {words[at : at + SHOWN]!r}, a full render has {here[at : at + SHOWN]!r}"

    def pass_written(self, words: str, opened: str) -> str | None:
        """Go past what the policy wrote. `opened` is a tag that it wrote though the header had written it."""
        wanted = "".join(words.split())
        here, position = 0, self.place
        if opened and wanted.startswith(opened) and not self.rendered[position:].lstrip().startswith(opened):
            here = len(opened)
        while here < len(wanted) and position < len(self.rendered):
            if self.rendered[position].isspace():
                position += 1
            elif self.rendered[position] == wanted[here]:
                position, here = position + 1, here + 1
            else:
                break
        if here < len(wanted):
            rest = self.rendered[position : position + SHOWN]
            return f"the policy wrote {wanted[here : here + SHOWN]!r} (white space aside), a full render has {rest!r}"
        self.place = position
        return None

    def ended(self, end: str) -> None:
        """Go past the end token that the policy wrote, if the template has it too."""
        self._skip_space()
        if end and self.rendered.startswith(end, self.place):
            self.place += len(end)

    def jump(self, prefix: str) -> str | None:
        """Go past words that the template writes in its own way, up to the end of this text."""
        if not self.rendered.startswith(prefix) or len(prefix) < self.place:
            at = shared(prefix, self.rendered)
            return f"the message was {prefix[at : at + SHOWN]!r}, a full render has {self.rendered[at : at + SHOWN]!r}"
        self.place = len(prefix)
        return None

    def _skip_space(self) -> None:
        while self.place < len(self.rendered) and self.rendered[self.place].isspace():
            self.place += 1


def render_problem(trajectories: Iterable[Trajectory]) -> str | None:
    """What is wrong with the episodes that hold other tokens than a full render of their messages; None for none."""
    played = [trajectory for trajectory in trajectories if trajectory.stop_reason is not StopReason.FAILED]
    checked = [trajectory for trajectory in played if trajectory.render_check is not None]
    deviating = [t for t in checked if t.render_check is not None and t.render_check.problem is not None]
    if not deviating:
        return None
    first, check = deviating[0], deviating[0].render_check
    return (
        f"{len(deviating)} of {len(checked)} checked episodes hold other tokens than one full render of their "
        f"messages, and neither the policy's words nor chat.history explains it; first: "
        f"sample {first.sample.id!r}, sibling {first.sibling}, {check.problem if check else ''}. The chat template "
        "rewrites what came before; use one that only appends (chat.template=chatml_hermes), or choose "
        "chat.history=verbatim or chat.history=segment"
    )
