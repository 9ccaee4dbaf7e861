"""A user who plays a script: what to say when, what the answer is worth, and what ends the conversation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnwise.errors import ConfigError, EpisodeError, nearest, unknown
from turnwise.rollout.interactions.base import BaseInteraction, Seen, check_options
from turnwise.scoring.scorer import Scorer, ScorerSpec, evaluate
from turnwise.strict_yaml import read_yaml
from turnwise.types import FinishReason, StopReason, Trajectory, Turn, is_right

RIGHT_BY = ("gsm8k", "gsm8k_strict", "gsm8k_flexible", "exact_match", "text_match", "search_qa", "math")
"""Scorers that compare an answer with the ground truth and reach for nothing else."""
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


class ScriptedTurn(BaseModel):
    """One entry of a script."""

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


@dataclass(slots=True)
class _Episode:
    turns: list[ScriptedTurn]
    blanks: dict[str, str]
    taken: dict[int, int] = field(default_factory=dict)
    score: float | None = None


class ScriptedInteraction(BaseInteraction):
    """Each time it is asked, takes the first turn whose conditions hold and that is not used up; leaves without one.

    The script is `turns`, a list, or `file`, a YAML file with that list under the key `turns`. A row may bring its own
    in `interaction_kwargs.turns`, and words for the blanks of either.
    """

    sees_episode: ClassVar[bool] = True

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        check_options("scripted", config, {"turns": list, "file": str, "right_by": str})
        if "turns" in config and "file" in config:
            raise ConfigError("interaction 'scripted': give turns or file, not both")
        self._turns: list[ScriptedTurn] | None = None
        if "turns" in config:
            self._turns = read_turns(config["turns"], "interaction 'scripted': turns")
        elif "file" in config:
            self._turns = read_script(Path(config["file"]))
        right_by = config.get("right_by", "gsm8k")
        if right_by not in RIGHT_BY:
            raise ConfigError(f"interaction 'scripted': {unknown('right_by', right_by, RIGHT_BY)}")
        self._scorer: Scorer = ScorerSpec(right_by).make()
        self._episodes: dict[str, _Episode] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        name = await super().start_interaction(instance_id)
        turns = self._turns
        if kwargs.get("turns") is not None:
            try:
                turns = read_turns(kwargs["turns"], "interaction_kwargs.turns")
            except ConfigError as error:  # a row's: its episode fails, the others go on
                raise EpisodeError(f"interaction 'scripted': {error}") from error
        if turns is None:
            raise EpisodeError(
                "interaction 'scripted' has no script: set rollout.interaction_kwargs={file: user.yaml}, or "
                "interaction_kwargs.turns in the row"
            )
        blanks = {key: str(value) for key, value in kwargs.items() if key not in _FACTS and _is_word(value)}
        for wanted in dict.fromkeys(blank for turn in turns for blank in _BLANK.findall(turn.say)):
            if wanted not in blanks:
                raise EpisodeError(
                    f"interaction 'scripted': the script says {{{wanted}}}, which interaction_kwargs lacks: "
                    f"{nearest(wanted, blanks)}"
                )
        self._episodes[name] = _Episode(turns, blanks)
        return name

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        episode, seen = self._episodes[instance_id], kwargs["seen"]
        is_answer_right: bool | None = None
        if any(turn.when.right is not None or turn.score == "right" for turn in episode.turns):
            is_answer_right = await self._right(seen)
        for number, turn in enumerate(episode.turns):
            if turn.times is not None and episode.taken.get(number, 0) >= turn.times:
                continue
            if not _holds(turn.when, seen, is_answer_right):
                continue
            episode.taken[number] = episode.taken.get(number, 0) + 1
            score = float(bool(is_answer_right)) if turn.score == "right" else turn.score
            episode.score = episode.score if score is None else score
            said = _BLANK.sub(lambda blank: episode.blanks[blank[1]], turn.say)
            note = {"script_turn": number, **({"said": said} if turn.end and said else {})}
            return turn.end, said, score, note
        return True, "", None, {"script_turn": None}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        return self._episodes[instance_id].score

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._episodes.pop(instance_id, None)  # none when it could not start

    async def _right(self, seen: Seen) -> bool:
        """What the scorer would say had the episode ended here."""
        turns = [Turn(n, message, FinishReason.UNKNOWN, 0, 0, 0) for n, message in enumerate(seen.answers)]
        here = Trajectory(seen.sample, 0, 0, list(seen.messages), turns, [], StopReason.UNKNOWN, 0.0)
        score = await evaluate(self._scorer, here)
        return is_right(score.reward, score.parts)


def read_script(path: Path) -> list[ScriptedTurn]:
    """The turns of a YAML file."""
    if not path.is_file():
        raise ConfigError(f"interaction 'scripted': no file {path} (from {Path.cwd()})")
    content = read_yaml(path)
    if not isinstance(content, Mapping) or list(content) != ["turns"]:
        raise ConfigError(f"{path}: expected one key, 'turns', with a list")
    return read_turns(content["turns"], f"{path}: turns")


def read_turns(given: Any, where: str) -> list[ScriptedTurn]:
    """Turns from plain values; ConfigError names the place and the nearest key."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ConfigError(f"{where}: expected a non-empty list, not {given!r:.80}")
    if len(given) > MOST_TURNS:
        raise ConfigError(f"{where}: {len(given)} turns; at most {MOST_TURNS} are read")
    return [_read_turn(entry, f"{where}[{number}]") for number, entry in enumerate(given)]


def _read_turn(entry: Any, where: str) -> ScriptedTurn:
    try:
        turn = ScriptedTurn.model_validate(entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        if first["type"] == "extra_forbidden":
            kind = When if len(first["loc"]) > 1 else ScriptedTurn
            raise ConfigError(f"{where}: {unknown('key', str(first['loc'][-1]), kind.model_fields)}") from error
        problem = f"{where}{'.' if place else ''}{place}: {first['msg']}, not {first['input']!r:.80}"
        raise ConfigError(problem) from error
    if not turn.say and not turn.end:
        raise ConfigError(f"{where}: needs what to say, or end: true")
    return turn


def _is_word(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _holds(when: When, seen: Seen, is_answer_right: bool | None) -> bool:
    answer = seen.answer[-LONGEST_READ:].casefold()
    if when.contains is not None and not any(one.casefold() in answer for one in _texts(when.contains)):
        return False
    if when.lacks is not None and any(one.casefold() in answer for one in _texts(when.lacks)):
        return False
    if when.matches is not None and not is_like(answer, when.matches.casefold()):
        return False
    if when.right is not None and is_answer_right is not when.right:
        return False
    if when.answers is not None and len(seen.answers) < when.answers:
        return False
    if when.called is None:
        return True
    called = {call.name for message in seen.answers for call in message.tool_calls if call.problem is None}
    return bool(called) is when.called if isinstance(when.called, bool) else bool(called & set(_texts(when.called)))


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


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


INTERACTION = ScriptedInteraction
