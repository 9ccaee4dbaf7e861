"""A user who plays a script: what to say when, what the answer is worth, and what ends the conversation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnwise.config.strict_yaml import read_yaml
from turnwise.errors import ConfigError, EpisodeError
from turnwise.errors.nearest_name import nearest, unknown
from turnwise.rollout.users.user import Reply, UserContext, UserSession, UserTurn
from turnwise.scoring.scorer import Scorer, ScorerSpec, evaluate
from turnwise.types import FinishReason, StopReason, Trajectory, Turn, is_right

WHO = "interaction 'scripted'"
RIGHT_BY = ("gsm8k", "gsm8k_strict", "gsm8k_flexible", "exact_match", "text_match", "search_qa", "math")
"""Scorers that compare an answer with the ground truth and reach for nothing else."""
PLAIN_OPTIONS = ("turns", "right_by")
"""Options that name no code, file or address: a run that somebody sent may set them."""
MOST_TURNS = 1000
LONGEST_READ = 100_000
"""Characters of an answer that conditions look at, from its end."""
_BLANK = re.compile(r"\{([A-Za-z_]\w{0,63})\}")
_FACTS = ("name", "query", "ground_truth", "turns")
"""Not for blanks: the script's own, and what a user must not tell."""


class When(BaseModel):
    """What must hold for a turn to be taken; all of it. Upper and lower case are the same."""

    model_config = ConfigDict(extra="forbid", strict=True)

    contains: str | list[str] | None = None
    """The answer holds this text, or one of these."""
    lacks: str | list[str] | None = None
    """It holds none of these."""
    matches: str | None = None
    """It is like this, where `*` stands for any text: `*order * is ready*`."""
    right: bool | None = None
    """It is right by the sample's ground truth, or it is not."""
    called: bool | str | list[str] | None = None
    """Any tool (true), no tool (false), or one of these was called since the episode began."""
    answers: int | None = Field(default=None, ge=1)
    """The assistant has answered at least so often."""


class ScriptStep(BaseModel):
    """One entry of a script: what the user says, and when."""

    model_config = ConfigDict(extra="forbid", strict=True)

    say: str = ""
    """What the user says; `{order}` is filled in with the row's `interaction_kwargs.order`."""
    when: When = Field(default_factory=When)
    times: int | None = Field(default=1, ge=1)
    """How often it may be taken in one episode; null for any number."""
    end: bool = False
    """Whether the user leaves with it."""
    score: Annotated[float, Field(allow_inf_nan=False)] | Literal["right"] | None = None
    """What the answer is worth; `right` is 1 or 0 by the ground truth."""


class ScriptedUser:
    """Each time it is asked, takes the first turn whose conditions hold and that is not used up; leaves without one.

    The script is `turns`, a list, or `file`, a YAML file with that list under the key `turns`. A row may bring its own
    in `interaction_kwargs.turns`, and words for the blanks of either.
    """

    def __init__(self, *, turns: list[Any] | None = None, file: str | None = None, right_by: str = "gsm8k") -> None:
        if turns is not None and file is not None:
            raise ConfigError(f"{WHO}: give turns or file, not both")
        self.turns: list[ScriptStep] | None = None
        if turns is not None:
            self.turns = read_turns(turns, f"{WHO}: turns")
        elif file is not None:
            self.turns = read_script(Path(file))
        if right_by not in RIGHT_BY:
            raise ConfigError(f"{WHO}: {unknown('right_by', right_by, RIGHT_BY)}")
        self.scorer: Scorer = ScorerSpec(right_by).make()

    async def open(self, context: UserContext) -> UserSession:
        kwargs, turns = context.kwargs, self.turns
        if kwargs.get("turns") is not None:
            try:
                turns = read_turns(kwargs["turns"], "interaction_kwargs.turns")
            except ConfigError as error:  # a row's: its episode fails, the others go on
                raise EpisodeError(f"{WHO}: {error}") from error
        if turns is None:
            raise EpisodeError(
                f"{WHO} has no script: set rollout.interaction_kwargs={{file: user.yaml}}, or "
                "interaction_kwargs.turns in the row"
            )
        blanks = {key: str(value) for key, value in kwargs.items() if key not in _FACTS and _is_word(value)}
        for blank in dict.fromkeys(blank for turn in turns for blank in _BLANK.findall(turn.say)):
            if blank not in blanks:
                raise EpisodeError(
                    f"{WHO}: the script says {{{blank}}}, which interaction_kwargs lacks: {nearest(blank, blanks)}"
                )
        return _ScriptedSession(self.scorer, turns, blanks)


@dataclass(slots=True)
class _ScriptedSession:
    scorer: Scorer
    script: list[ScriptStep]
    blanks: dict[str, str]
    uses: dict[int, int] = field(default_factory=dict)
    """How often each entry was taken."""

    async def reply(self, turn: UserTurn) -> Reply:
        is_answer_right: bool | None = None
        if any(entry.when.right is not None or entry.score == "right" for entry in self.script):
            is_answer_right = await self._is_right(turn)
        for number, entry in enumerate(self.script):
            if entry.times is not None and self.uses.get(number, 0) >= entry.times:
                continue
            if not _holds(entry.when, turn, is_answer_right):
                continue
            self.uses[number] = self.uses.get(number, 0) + 1
            score = float(bool(is_answer_right)) if entry.score == "right" else entry.score
            text = _BLANK.sub(lambda blank: self.blanks[blank[1]], entry.say)
            note = {"script_turn": number, **({"said": text} if entry.end and text else {})}
            return Reply(text, score, entry.end, note)
        return Reply(end=True, note={"script_turn": None})

    async def _is_right(self, turn: UserTurn) -> bool:
        """What the scorer would say had the episode ended here."""
        turns = [Turn(n, message, FinishReason.UNKNOWN, 0, 0, 0) for n, message in enumerate(turn.answers)]
        here = Trajectory(turn.sample, 0, 0, list(turn.messages), turns, [], StopReason.UNKNOWN, 0.0)
        score = await evaluate(self.scorer, here)
        return is_right(score.reward, score.parts)


def read_script(path: Path) -> list[ScriptStep]:
    """The scripted turns of a YAML file; ConfigError for what is none."""
    if not path.is_file():
        raise ConfigError(f"{WHO}: no file {path} (from {Path.cwd()})")
    content = read_yaml(path)
    if not isinstance(content, Mapping) or list(content) != ["turns"]:
        raise ConfigError(f"{path}: expected one key, 'turns', with a list")
    return read_turns(content["turns"], f"{path}: turns")


def read_turns(entries: Any, where: str) -> list[ScriptStep]:
    """Turns from plain values; ConfigError names the place and the nearest key."""
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ConfigError(f"{where}: expected a non-empty list, not {entries!r:.80}")
    if len(entries) > MOST_TURNS:
        raise ConfigError(f"{where}: {len(entries)} turns; at most {MOST_TURNS} are read")
    return [_read_turn(entry, f"{where}[{number}]") for number, entry in enumerate(entries)]


def _read_turn(entry: Any, where: str) -> ScriptStep:
    try:
        turn = ScriptStep.model_validate(entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = ".".join(str(step) for step in first["loc"])
        if first["type"] == "extra_forbidden":
            kind = When if len(first["loc"]) > 1 else ScriptStep
            raise ConfigError(f"{where}: {unknown('key', str(first['loc'][-1]), kind.model_fields)}") from error
        problem = f"{where}{'.' if location else ''}{location}: {first['msg']}, not {first['input']!r:.80}"
        raise ConfigError(problem) from error
    if not turn.say and not turn.end:
        raise ConfigError(f"{where}: set say (a text), or end: true")
    return turn


def _is_word(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _holds(when: When, turn: UserTurn, is_answer_right: bool | None) -> bool:
    answer = turn.answer[-LONGEST_READ:].casefold()
    if when.contains is not None and not any(text.casefold() in answer for text in _texts(when.contains)):
        return False
    if when.lacks is not None and any(text.casefold() in answer for text in _texts(when.lacks)):
        return False
    if when.matches is not None and not is_like(answer, when.matches.casefold()):
        return False
    if when.right is not None and is_answer_right is not when.right:
        return False
    if when.answers is not None and len(turn.answers) < when.answers:
        return False
    if when.called is None:
        return True
    called = {call.name for message in turn.answers for call in message.tool_calls if call.problem is None}
    return bool(called) is when.called if isinstance(when.called, bool) else bool(called & set(_texts(when.called)))


def _texts(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def is_like(text: str, pattern: str) -> bool:
    """Whether the text is the pattern, with any text for each `*`; in linear time, as no regular expression is."""
    text, pattern = text.strip(), pattern.strip()
    first, *rest = pattern.split("*")
    if not rest:
        return text == first
    last = rest.pop()
    if len(text) < len(first) + len(last) or not text.startswith(first) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for piece in rest:
        at = text.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True


scripted = ScriptedUser
