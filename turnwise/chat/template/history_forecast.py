"""What `chat.history` will do in the episodes of a plan, found by trying, and the words in which the plan says so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnwise.chat.images.blocks import MediaOf
from turnwise.chat.template.analysis import read_variables
from turnwise.chat.template.trials import Course, Exchange, Tried, exchanges, play, try_out
from turnwise.config.choices import HistoryPolicy
from turnwise.errors import TemplateError
from turnwise.types import JsonSchema, Message, Role

if TYPE_CHECKING:
    from turnwise.chat.renderer import Renderer

ROUNDS = 4
"""Calls in a row by which growth is shown."""
SWITCHES = ("preserve_thinking", "truncate_history_thinking", "clear_thinking")
"""What templates in use call it; others are tried after these."""
MOST_SWITCHES = 8
"""Variables of a template that are tried as its switch."""


@dataclass(frozen=True, slots=True)
class TemplateForecast:
    """What becomes of the tokens so far in the episodes of one route."""

    history: HistoryPolicy
    tried: tuple[Tried, ...] = ()
    switch: tuple[str, bool] | None = None
    """An argument of the template's own that has it only append."""
    growth: tuple[int, float] | None = None
    """(sequences, times the tokens of one sequence) of some calls in a row, where each opens a sequence."""
    refused: str | None = None
    """Why no episode could be played."""

    @property
    def only_appends(self) -> bool:
        """Whether every token of a full render stays."""
        return self.refused is None and all(trial.course is Course.APPENDS for trial in self.tried)

    def reopens(self, by: Role) -> bool:
        """Whether a reply of this role opens a new sequence, at least after some messages."""
        return any(
            trial.course is Course.REOPENS and trial.exchange and trial.exchange.by is by for trial in self.tried
        )

    @property
    def warns(self) -> bool:
        """Whether a person should look: every tool result opens a sequence, so that what is trained grows with the
        square of the calls, or a mode was chosen that this template makes a difference to."""
        return self.reopens(Role.TOOL) or not (self.only_appends or self.history is HistoryPolicy.auto)

    @property
    def text(self) -> str:
        """One line: what the template does, what is done about it, and what else could be."""
        if self.only_appends:
            return "the template only appends: earlier tokens never change"
        keeps = [trial for trial in self.tried if trial.course is Course.KEEPS]
        reopening = [trial for trial in self.tried if trial.course is Course.REOPENS]
        remarks = []
        if keeps and self.history is HistoryPolicy.auto:
            remarks.append(
                f"the template adds and removes empty thoughts ({_names(keeps)}): sampled tokens are kept unchanged"
            )
        elif keeps:
            remarks.append(f"the template rewrites history ({_names(keeps)}): sampled tokens are kept as they are")
        if reopening:
            remarks.append(self._reopening(reopening))
        return "; ".join(remarks)

    def _reopening(self, reopening: Sequence[Tried]) -> str:
        thoughts = all(trial.thinks for trial in reopening if trial.exchange)
        what = "drops thoughts of the policy" if thoughts else "rewrites history"
        when = "in longer conversations, and a new sequence starts there"
        if self.reopens(Role.USER):
            when = "when a user speaks, and a new sequence starts there"
        if self.reopens(Role.TOOL):
            when = "at every tool result, and each starts a new sequence"
        if self.growth is not None:
            count, times = self.growth
            when += f" ({ROUNDS} calls: {count} sequences, {times:.1f} times the tokens)"
        keep = "chat.history=verbatim keeps one sequence"
        if self.switch is not None:
            name, value = self.switch
            keep = f"chat.template_kwargs={{{name}: {str(value).lower()}}} has it keep them, {keep}"
        return f"the template {what} {when}; {keep}"


def forecast(
    renderer: "Renderer",
    prompt: Sequence[Message],
    schemas: Sequence[JsonSchema],
    *,
    tools: bool,
    user: bool,
    media: MediaOf,
) -> TemplateForecast:
    """Try every kind of exchange that episodes with these tools, and a user or none, can hold."""
    possible = list(exchanges(renderer, tools=tools, user=user))
    try:
        tried = tuple(try_out(renderer, prompt, schemas, possible, media))
    except TemplateError as error:
        return TemplateForecast(renderer.history, refused=str(error))
    result = TemplateForecast(renderer.history, tried)
    if result.only_appends or not any(trial.course is Course.REOPENS for trial in tried):
        return result
    switch = _switch(renderer, prompt, schemas, possible, media)
    growth = _growth(renderer, prompt, schemas, tried, media) if result.reopens(Role.TOOL) else None
    return TemplateForecast(renderer.history, tried, switch, growth)


def _growth(
    renderer: "Renderer",
    prompt: Sequence[Message],
    schemas: Sequence[JsonSchema],
    tried: Sequence[Tried],
    media: MediaOf,
) -> tuple[int, float] | None:
    """Of an exchange that opens a sequence, with a thought where there is the choice."""
    opening = [trial.exchange for trial in tried if trial.exchange and trial.course is Course.REOPENS]
    calls = [exchange for exchange in opening if exchange.by is Role.TOOL]
    calls = sorted(calls, key=lambda exchange: not exchange.thinks)[:1] * ROUNDS
    try:
        split = play(renderer, prompt, schemas, calls, media)
        whole = play(renderer.with_history(HistoryPolicy.verbatim), prompt, schemas, calls, media)
    except TemplateError:  # it was only an example
        return None
    return len(split), sum(map(len, split)) / max(sum(map(len, whole)), 1)


def _switch(
    renderer: "Renderer",
    prompt: Sequence[Message],
    schemas: Sequence[JsonSchema],
    possible: Sequence[Exchange],
    media: MediaOf,
) -> tuple[str, bool] | None:
    """An argument by which the template keeps what it drops, and opens a message as before; None when it has none."""
    kwargs = renderer.template.kwargs
    read = {name for source in renderer.tokenizer.templates.values() for name in read_variables(source)}
    likely = [name for name in sorted(read - kwargs.keys()) if "think" in name or "reason" in name]
    for name in sorted(likely, key=lambda name: name not in SWITCHES)[:MOST_SWITCHES]:
        for value in (True, False):
            try:
                other = renderer.with_kwargs({**kwargs, name: value}).with_history(HistoryPolicy.refuse)
                if other.template.opening == renderer.template.opening:
                    play(other, prompt, schemas, [*possible, *possible], media)
                    return name, value
            except TemplateError:
                continue
    return None


def _names(tried: Sequence[Tried]) -> str:
    return ", ".join(trial.name for trial in tried)
