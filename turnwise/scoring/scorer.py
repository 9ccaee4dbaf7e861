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

from turnwise.concurrency import gather_all
from turnwise.errors import ConfigError, PluginError, ScoringFailed, TurnwiseError, unknown
from turnwise.plugins import load
from turnwise.sandbox.process import SandboxLost
from turnwise.scoring.trl_rewards import Judged, TrlRewards, is_trl
from turnwise.scoring.verl_managers import is_manager, manager_scorer
from turnwise.types import Remark, Role, StopReason, Trajectory

LONGEST_CAUSE = 300
LONGEST_REMARK = 10_000
"""Characters kept of what a scorer raised, and of what a judge wrote."""
KEPT_SCORERS = 256
"""Made scorers by name and options, where those come from elsewhere: ever new options must not fill the memory."""
TOTAL = "score"
"""The part that is the reward; without it the parts are added."""

_VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth")
_OF_A_ROUTER = ("reward_router_address", "reward_model_tokenizer")
"""What verl's reward loop passes for a reward model that it serves; there is none here."""


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
        if self.name in BUILTIN:
            return as_scorer(load(BUILTIN[self.name], "scorer"), self.name, self.options)
        if not {":", "."} & set(self.name):
            raise ConfigError(unknown("scorer", self.name, BUILTIN) + " Your own is written module:function.")
        return as_scorer(load(self.name, "scorer"), self.name, self.options)


BUILTIN: dict[str, str] = {
    "gsm8k": "turnwise.scoring.gsm8k:gsm8k",
    "gsm8k_strict": "turnwise.scoring.gsm8k:gsm8k_strict",
    "gsm8k_flexible": "turnwise.scoring.gsm8k:gsm8k_flexible",
    "tapo": "turnwise.scoring.tapo:tapo",
    "exact_match": "turnwise.scoring.text_match:exact_match",
    "text_match": "turnwise.scoring.text_match:text_match",
    "search_qa": "turnwise.scoring.text_match:search_qa",
    "cited_answer": "turnwise.scoring.cited_answer:cited_answer",
    "math": "turnwise.scoring.math_boxed:math_boxed",
    "format_rules": "turnwise.scoring.format_rules:format_rules",
    "code_tests": "turnwise.scoring.code_tests:code_tests",
    "swe_tests": "turnwise.scoring.swe_tests:swe_tests",
    "judge": "turnwise.scoring.judge_scorer:judge",
    "environment": "turnwise.scoring.episode_scores:environment",
    "interaction": "turnwise.scoring.episode_scores:interaction",
    "loop_reward": "turnwise.scoring.episode_scores:loop_reward",
    "verl_default": "turnwise.compat.verl_default:verl_default",
}
"""Where a built-in scorer lives; its parameters after the trajectory are its options."""


def as_scorer(function: Any, spec: str, options: Mapping[str, Any] | None = None) -> Scorer:
    """A loaded function as a scorer: `f(trajectory)`, verl's `compute_score(data_source, ...)` or one of TRL's."""
    if is_trl(function):
        return _trl_scorer(TrlRewards(function, spec, options or {}), spec)
    if not callable(function):
        raise PluginError(f"scorer {spec}: {type(function).__name__} cannot be called")
    if is_manager(function):
        return _checked_manager(manager_scorer(function, spec, options or {}), spec)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise PluginError(f"scorer {spec}: its signature cannot be read") from error
    is_verl = all(name in parameters for name in _VERL_PARAMETERS)
    accepted = (*_VERL_PARAMETERS, "extra_info", *_OF_A_ROUTER) if is_verl else tuple(parameters)[:1]
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = dict(options or {})
    extra = [
        name
        for name, parameter in parameters.items()
        if name not in (*accepted, *given) and parameter.default is parameter.empty and parameter.kind not in open_kinds
    ]
    first = next(iter(parameters.values()), None)
    takes_one = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    if extra or not (is_verl or takes_one):
        wanted = (
            "(trajectory), (data_source, solution_str, ground_truth, extra_info) or (prompts, completions, **kwargs)"
        )
        raise PluginError(f"scorer {spec} takes ({', '.join(map(str, parameters.values()))}); it must take {wanted}")
    _check_options(given, [name for name in parameters if name not in accepted], parameters, spec)
    if is_verl:
        absent = {name: None for name in _OF_A_ROUTER if name in parameters and name not in given}
        takes_info = "extra_info" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        return _verl_scorer(functools.partial(function, **absent, **given), spec, takes_info)
    return _plain_scorer(functools.partial(function, **given), spec)


def _trl_scorer(rewards: TrlRewards, spec: str) -> Scorer:
    async def first(trajectory: Trajectory) -> Score:
        return trl_score((await rewards.score([trajectory]))[0])

    return _plain_scorer(first, spec)


def trl_score(judged: Judged | ScoringFailed) -> Score:
    """What TRL's functions said about one trajectory."""
    if isinstance(judged, ScoringFailed):
        raise judged
    return Score(judged.reward, judged.parts, remarks=judged.remarks)


def _checked_manager(manager: Callable[[Trajectory], Awaitable[Any]], spec: str) -> Scorer:
    async def scorer(trajectory: Trajectory) -> Any:
        return verl_result(await manager(trajectory), spec)

    scorer.__qualname__ = spec
    return scorer


def _check_options(
    given: Mapping[str, Any], known: Sequence[str], parameters: Mapping[str, inspect.Parameter], spec: str
) -> None:
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for key in given:
        if key not in known:
            raise ConfigError(f"scoring.options, scorer {spec}: {unknown('option', key, known)}")


def _plain_scorer(function: Callable[..., Any], spec: str) -> Scorer:
    async def scorer(trajectory: Trajectory) -> Any:
        result = function(trajectory)
        return await result if inspect.isawaitable(result) else result

    scorer.__qualname__ = spec
    return scorer


def _verl_scorer(function: Callable[..., Any], spec: str, takes_info: bool) -> Scorer:
    """A verl reward function. It is given the last assistant message, not the whole conversation as in verl, where
    tool and user text could be taken for an answer."""

    async def scorer(trajectory: Trajectory) -> Any:
        sample = trajectory.sample
        arguments: dict[str, Any] = {
            "data_source": sample.data_source,
            "solution_str": solution_of(trajectory),
            "ground_truth": sample.ground_truth,
        }
        if takes_info:
            arguments["extra_info"] = verl_extra_info(trajectory)
        result = function(**arguments)
        return verl_result(await result if inspect.isawaitable(result) else result, spec)

    scorer.__qualname__ = spec
    return scorer


def solution_of(trajectory: Trajectory) -> str:
    """What verl's functions get as the solution: the last answer; with compat.strict all that followed the prompt."""
    whole = trajectory.artifacts.get("solution_str")
    if isinstance(whole, str):
        return whole
    return trajectory.answers[-1].text if trajectory.answers else ""


def verl_result(result: Any, spec: str) -> Any:
    """What a verl reward function returned. A dict must hold `score`; a text beside it is no reward but a remark."""
    if not isinstance(result, dict):
        return result
    if TOTAL not in result:
        raise PluginError(f"scorer {spec} returned a dict without {TOTAL!r}: {sorted(map(str, result))}")
    kept = {name: value for name, value in result.items() if name == TOTAL or isinstance(value, numbers.Real)}
    remarks = tuple(
        Remark(str(name), text) for name, text in result.items() if name not in kept and isinstance(text, str) and text
    )
    return dataclasses.replace(_sum(kept, spec), remarks=remarks)


def verl_extra_info(trajectory: Trajectory) -> dict[str, Any]:
    """The row's extra_info with what verl's loops add; replies of one turn count as one turn there."""
    return {
        **trajectory.sample.info.get("extra_info", {}),
        "rollout_reward_scores": trajectory.artifacts.get("tool_rewards", {}),
        "num_turns": 1 + len(trajectory.turns) + sum(bool(turn.replies) for turn in trajectory.turns),
        "turn_scores": [turn.user_score for turn in trajectory.turns if turn.user_score is not None],
        "tool_rewards": [call.score for call in trajectory.calls if call.score is not None],
    }


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
    except SandboxLost as error:
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
    return _sum(result, name) if isinstance(result, dict) else Score(_number(result, name, "a score"))


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
        text = f"(its text cannot be had: {type(broken).__name__})"
    cause = f"{type(error).__qualname__}: {text[:LONGEST_CAUSE]}".removesuffix(": ")
    return ScoringFailed(f"scorer {name} raised {cause}{where}")


def _sum(result: dict[Any, Any], name: str) -> Score:
    """Parts by name; the reward is the one called `score`, or their sum."""
    parts = _parts(result, name)
    if not parts:
        raise PluginError(f"scorer {name} returned an empty dict, {{}}; it needs {TOTAL!r} or parts to add up")
    total = parts.pop(TOTAL) if TOTAL in parts else sum(parts.values())
    return Score(_number(total, name, "the sum of its parts"), parts)


def _checked(score: Score, trajectory: Trajectory, name: str) -> Score:
    for what, mapping in (("parts", score.parts), ("turns", score.turns)):
        if not isinstance(mapping, Mapping):
            raise PluginError(f"scorer {name} returned a Score whose {what} are {reprlib.repr(mapping)}, no mapping")
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
        raise PluginError(f"scorer {name} returned the remark {reprlib.repr(remark)}: no Remark with a text on a turn")
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
        shown = reprlib.repr(value)
        raise PluginError(f"scorer {scorer} returned {shown} ({kind}) as {what}; it must be a finite number")
    return number
