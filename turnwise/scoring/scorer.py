"""What a scorer is, which one a data source gets, and how its result becomes a trajectory's reward."""

import asyncio
import dataclasses
import functools
import inspect
import math
import numbers
import reprlib
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from turnwise.errors import ConfigError, MachineryLost, PluginError, ScoringFailed, TurnwiseError
from turnwise.errors.nearest_name import unknown
from turnwise.extensions import named
from turnwise.system.concurrency import gather_all
from turnwise.system.plugins import adapted, load
from turnwise.types import Remark, Role, StopReason, Trajectory

LONGEST_CAUSE = 300
LONGEST_REMARK = 10_000
"""Characters kept of what a scorer raised, and of what a judge wrote."""
KEPT_SCORERS = 256
"""Made scorers by name and options, where those come from elsewhere: ever new options must not fill the memory."""
TOTAL = "score"
"""The part that is the reward; without it the parts are added."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a trajectory is worth: `Score(1.5, {"correct": 1.0, "format": 0.5})`; `turns` has scores by turn index,
    `remarks` the words that came with them."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    turns: dict[int, dict[str, float]] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()


Scorer = Callable[[Trajectory], Awaitable[float | dict[str, float] | Score]]
"""Reads a finished trajectory, changes nothing, and says what it is worth: a number, numbers by part, or a Score."""


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """A scorer by name and options: all that another process needs to make it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Scorer:
        """The scorer, with its name, options and signature checked."""
        builtin = builtin_scorers()
        if self.name not in builtin and not {":", "."} & set(self.name):
            raise ConfigError(unknown("scorer", self.name, builtin) + " Your own is written as file.py:function.")
        return as_scorer(load(builtin.get(self.name, self.name), "scorer"), self.name, self.options)


BUILTIN: dict[str, str] = {
    "gsm8k": "turnwise.scoring.rules.gsm8k:gsm8k",
    "gsm8k_strict": "turnwise.scoring.rules.gsm8k:gsm8k_strict",
    "gsm8k_flexible": "turnwise.scoring.rules.gsm8k:gsm8k_flexible",
    "exact_match": "turnwise.scoring.rules.text_match:exact_match",
    "text_match": "turnwise.scoring.rules.text_match:text_match",
    "search_qa": "turnwise.scoring.rules.text_match:search_qa",
    "math": "turnwise.scoring.rules.math_boxed:math_boxed",
    "format_rules": "turnwise.scoring.rules.format_rules:format_rules",
    "environment": "turnwise.scoring.episode_scores:environment",
    "interaction": "turnwise.scoring.episode_scores:interaction",
}
"""Where a built-in scorer lives; its parameters after the trajectory are its options."""


def builtin_scorers() -> dict[str, str]:
    """Ours, and those that extensions bring."""
    return {**BUILTIN, **named("scorers", BUILTIN)}


def as_scorer(function: Any, name: str, options: Mapping[str, Any] | None = None) -> Scorer:
    """A loaded function as a scorer: `async def reward(trajectory, *, option=...)`, or what an extension makes of it.

    Ours is known by its first parameter, which is called `trajectory` or annotated so. One of another name is ours too,
    where no extension knows the function as one of its own kind.
    """
    spec = ScorerSpec(name, dict(options or {}))
    parameters = parameters_of(function)
    first = next(iter(parameters.values()), None)
    if first is None or not (first.name == "trajectory" or first.annotation in (Trajectory, Trajectory.__name__)):
        foreign: Scorer | None = adapted("scorer", function, spec)
        if foreign is not None:
            return foreign
    if not callable(function):
        raise PluginError(f"scorer {name}: {type(function).__name__} cannot be called")
    if first is None:
        _demand_signature(function, name)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise _refused(name, parameters)
    if any(
        needs_value(parameter) for parameter in parameters.values() if parameter.name not in (first.name, *spec.options)
    ):
        raise _refused(name, parameters)
    check_options(spec, parameters, [first.name])
    return called(functools.partial(function, **spec.options), name)


def _demand_signature(function: Callable[..., Any], name: str) -> None:
    try:
        inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise PluginError(f"scorer {name}: its signature cannot be read") from error


def _refused(name: str, parameters: Mapping[str, inspect.Parameter]) -> PluginError:
    return PluginError(
        f"scorer {name} takes ({', '.join(map(str, parameters.values()))}); it must take (trajectory), and after it "
        "options by name that have defaults or values in scoring.options; no extension accepts its form either"
    )


def parameters_of(function: object) -> Mapping[str, inspect.Parameter]:
    """What a function takes, by name; nothing for what cannot be called or does not say."""
    if not callable(function):
        return {}
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def needs_value(parameter: inspect.Parameter) -> bool:
    """Whether a call fails without it."""
    open_kinds = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in open_kinds


def check_options(spec: ScorerSpec, parameters: Mapping[str, inspect.Parameter], filled: Sequence[str]) -> None:
    """ConfigError for an option that is no parameter, or one of those that are `filled` from the trajectory."""
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    valid = [key for key in parameters if key not in filled]
    for key in spec.options:
        if key in filled or (key not in valid and not open_ended):
            raise ConfigError(f"scoring.options, scorer {spec.name}: {unknown('option', key, valid)}")


def called(function: Callable[[Trajectory], Any], name: str) -> Scorer:
    """A function of a trajectory, async or not, as a scorer of this name."""

    async def scorer(trajectory: Trajectory) -> Any:
        result = function(trajectory)
        return await result if inspect.isawaitable(result) else result

    scorer.__qualname__ = name
    return scorer


async def apply(scorer: Scorer, trajectory: Trajectory) -> None:
    """Fill `reward`, `parts`, `remarks` and the turns' `scores`; a failed episode gets none.

    When the machinery of scoring fails, the trajectory is failed too: left out of baselines, never given a zero.
    """
    if is_failed(trajectory):
        return
    try:
        score = await evaluate(scorer, trajectory)
    except ScoringFailed as error:
        trajectory.failure = f"{SCORING}: {error}"
        return
    trajectory.reward, trajectory.parts, trajectory.remarks = score.reward, score.parts, list(score.remarks)
    for turn in trajectory.every_turn:
        turn.scores = dict(score.turns.get(turn.index, {}))


SCORING = "scoring"
"""How the failure of a trajectory begins when nothing was wrong with its episode."""


async def apply_all(scorer: Scorer, trajectories: Sequence[Trajectory]) -> None:
    """`apply` to all of them at once, so that a pool, a server or a batch sees them together."""
    await gather_all(apply(scorer, trajectory) for trajectory in trajectories)


async def score_answer(scorer: Scorer, trajectory: Trajectory, upto: int) -> Score | None:
    """The score had the episode ended after its first `upto` turns; None for a failed trajectory."""
    return None if is_failed(trajectory) else await evaluate(scorer, cut(trajectory, upto))


def is_failed(trajectory: Trajectory) -> bool:
    """Whether infrastructure ended the episode."""
    return trajectory.failure is not None or trajectory.stop_reason is StopReason.FAILED


def turns_before_feedback(trajectory: Trajectory) -> int:
    """How many turns pass until the interaction first replies; all of them when it never does."""
    for number, turn in enumerate(trajectory.turns, start=1):
        if any(reply.role is Role.USER for reply in turn.replies):
            return number
    return len(trajectory.turns)


def cut(trajectory: Trajectory, turns: int) -> Trajectory:
    """A shallow copy that ends after the first `turns` turns and what was replied to them, without branches then.

    Reward, remarks, advantage and render check are left out; stop reason and seconds stay those of the whole episode.
    """
    if not 0 <= turns <= len(trajectory.turns):
        raise ValueError(f"cannot cut after turn {turns} of {len(trajectory.turns)}")
    messages, segments, branches = trajectory.messages, trajectory.segments, trajectory.branches
    if turns < len(trajectory.turns):
        # The prompt may hold assistant messages too, so the policy's are counted from the end.
        by_policy = [index for index, message in enumerate(messages) if message.role is Role.ASSISTANT]
        messages = messages[: by_policy[turns - len(trajectory.turns)]]
        after, branches = trajectory.turns[turns], []
        if segments:
            segments = [*segments[: after.segment], segments[after.segment].prefix(after.start)]
    return dataclasses.replace(
        trajectory,
        turns=trajectory.turns[:turns],
        messages=list(messages),
        segments=list(segments),
        branches=list(branches),
        render_check=None,
        reward=None,
        parts={},
        advantage=None,
        remarks=[],
    )


async def evaluate(scorer: Scorer, trajectory: Trajectory) -> Score:
    """What the scorer says, checked: finite numbers by name, for turns that exist.

    A result that is none is a mistake of the scorer's, a PluginError. What it raises says nothing about the policy and
    becomes ScoringFailed, but for a TurnwiseError, which a person must mend first.
    """
    name = name_of(scorer)
    try:
        result: Any = await scorer(trajectory)
    except MachineryLost as error:
        raise raised_by(name, error) from error
    except (ScoringFailed, TurnwiseError):
        raise
    except (Exception, SystemExit) as error:
        raise raised_by(name, error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise raised_by(name, error) from error  # nobody cancelled us: the scorer itself raised it
    if isinstance(result, Score):
        return _checked(result, trajectory, name)
    return sum_of_parts(result, name) if isinstance(result, dict) else Score(_number(result, name, "a score"))


def name_of(scorer: Scorer) -> str:
    """What a scorer is called in messages."""
    return str(getattr(scorer, "__qualname__", type(scorer).__name__))


def raised_by(name: str, error: BaseException) -> ScoringFailed:
    """The failure of a scorer that raised, on one line, with the place in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({PurePath(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # a class of a plug-in, which may do anything here
        text = f"(its text cannot be read: {type(broken).__name__})"
    cause = f"{type(error).__qualname__}: {text[:LONGEST_CAUSE]}".removesuffix(": ")
    return ScoringFailed(f"scorer {name} raised {cause}{where}")


def sum_of_parts(result: dict[Any, Any], name: str) -> Score:
    """Parts by name; the reward is the one called `score`, or their sum."""
    parts = _parts(result, name)
    if not parts:
        raise PluginError(f"scorer {name} returned an empty dict, {{}}; it needs {TOTAL!r} or parts to add up")
    total = parts.pop(TOTAL) if TOTAL in parts else sum(parts.values())
    return Score(_number(total, name, "the sum of its parts"), parts)


def _checked(score: Score, trajectory: Trajectory, name: str) -> Score:
    for what, mapping in (("parts", score.parts), ("turns", score.turns)):
        if not isinstance(mapping, Mapping):
            raise PluginError(f"scorer {name} returned a Score whose {what} are {reprlib.repr(mapping)}, not a mapping")
    existing = {turn.index for turn in trajectory.every_turn}
    if not existing.issuperset(score.turns):
        raise PluginError(f"scorer {name} scored turns {sorted(score.turns)}; there are {sorted(existing)}")
    return Score(
        _number(score.reward, name, "the reward"),
        _parts(score.parts, name),
        {turn: _parts(scores, name, f" of turn {turn}") for turn, scores in score.turns.items()},
        tuple(_remark(remark, existing, name) for remark in score.remarks),
    )


def _parts(parts: Mapping[Any, Any], scorer: str, where: str = "") -> dict[str, float]:
    """Numbers by name; a name that is no text would be another one after the run is read back."""
    for part in parts:
        if not isinstance(part, str) or not part:
            raise PluginError(f"scorer {scorer} named a part{where} {reprlib.repr(part)}: names of parts are texts")
    return {part: _number(value, scorer, f"part {part!r}{where}") for part, value in parts.items()}


def _remark(remark: Any, turns: set[int], name: str) -> Remark:
    good = isinstance(remark, Remark) and isinstance(remark.by, str) and isinstance(remark.text, str)
    if not good or remark.turn not in {None, *turns}:
        raise PluginError(f"scorer {name} returned {reprlib.repr(remark)} as a remark: it must be a Remark on a turn")
    text, value = remark.text, remark.value
    return Remark(
        remark.by,
        text if len(text) <= LONGEST_REMARK else f"{text[:LONGEST_REMARK]}… ({len(text)} characters)",
        None if value is None else _number(value, name, f"the value of a remark by {remark.by}"),
        remark.turn,
    )


def _number(value: Any, scorer: str, what: str) -> float:
    if type(value) is float and math.isfinite(value):  # nearly always, and the checks below are slow
        return value
    number = math.nan
    if isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not math.isfinite(number):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise PluginError(
            f"scorer {scorer} returned {reprlib.repr(value)} ({kind}) as {what}; it must be a finite number"
        )
    return number
