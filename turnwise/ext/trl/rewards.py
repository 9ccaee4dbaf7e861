"""TRL's reward functions as scorers: `f(prompts, completions, **columns) -> list[float | None]`, one or several.

They are known by a parameter of TRL's own: `completions`, `completion_ids`, `prompts` or another. A function gets
what `GRPOTrainer` would give it: the row's columns by name, `completion_ids`, `trainer_state`, `log_extra` and
`log_metric`; without `**kwargs` it gets those it names.
"""

import inspect
import itertools
import math
import numbers
import reprlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.data.sample_to_row import to_values
from turnwise.data.samples import PLAIN_PROMPT
from turnwise.errors import ConfigError, PluginError, ScoringFailed
from turnwise.errors.nearest_name import unknown
from turnwise.scoring.runners.batch import BatchFunction, in_thread
from turnwise.scoring.scorer import Score, Scorer, ScorerSpec, called, parameters_of
from turnwise.types import Message, Origin, Remark, Role, Text, Trajectory

_OPTIONS = ("weights", "columns")
_PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_OF_OTHERS = ("trajectory", "trajectories", "data_source", "data_sources")
"""Parameters of our own scorers and of verl's, which may have options of any name."""
_UNREAD = ("prompt", "completion", "completion_ids")
"""Columns that TRL keeps from reward functions."""

CallSync = Callable[[Callable[[], Any]], Awaitable[Any]]
"""How a function that is not async is called when it is not to be called here: in a thread."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What is known of the training while a trajectory is scored; other fields of TRL's state are not there."""

    global_step: int


def scorer(value: object, spec: ScorerSpec) -> Scorer | None:
    """The adapter: a reward function or a list of them as a scorer of one trajectory; None for anything else."""
    if not is_trl(value):
        return None
    rewards = TrlRewards(value, spec.name, spec.options)

    async def score(trajectory: Trajectory) -> Score:
        (result,) = await rewards.score([trajectory])
        if isinstance(result, ScoringFailed):
            raise result
        return result

    return called(score, spec.name)


def batch_scorer(value: object, spec: ScorerSpec) -> BatchFunction | None:
    """The adapter for many trajectories in one call, as TRL itself makes it."""
    if not is_trl(value):
        return None
    rewards = TrlRewards(value, spec.name, spec.options)
    return lambda batch: rewards.score(batch, in_thread)


@dataclass(slots=True)
class _Log:
    """What functions log about a batch of trajectories: columns become remarks, metrics parts of each."""

    size: int
    spec: str
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != self.size:
            raise PluginError(f"scorer {self.spec}: log_extra({column!r}) has {len(values)} values, not {self.size}")
        self.columns[column] = list(values)

    def metric(self, name: str, value: float) -> None:
        self.metrics[name] = float(value)


class TrlRewards:
    """Reward functions of TRL's kind with their weights; `score` asks all of them about a batch of trajectories."""

    def __init__(self, rewards: Any, spec: str, options: Mapping[str, Any]) -> None:
        functions = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
        for key in options:
            if key not in _OPTIONS:
                raise ConfigError(f"scoring.options, scorer {spec}: {unknown('option', key, _OPTIONS)}")
        weights = options.get("weights", [1.0] * len(functions))
        if not isinstance(weights, Sequence) or len(weights) != len(functions) or not all(map(_is_finite, weights)):
            raise ConfigError(f"scoring.options, scorer {spec}: weights are {len(functions)} numbers, not {weights!r}")
        columns = options.get("columns", {})
        if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns.values()):
            raise ConfigError(f"scoring.options, scorer {spec}: columns maps a parameter to a column, not {columns!r}")
        self._spec, self._columns = spec, dict(columns)
        self._functions = dict(zip(_names(functions), functions, strict=True))
        self._weights = [float(weight) for weight in weights]

    async def score(
        self, batch: Sequence[Trajectory], call_sync: CallSync | None = None
    ) -> list[Score | ScoringFailed]:
        """One result for each trajectory; ScoringFailed for one of which every function says nothing."""
        log = _Log(len(batch), self._spec)
        arguments = self._arguments(batch, log)
        rewards: dict[str, list[float | None]] = {}
        for name, function in self._functions.items():
            rewards[name] = await self._ask(function, name, arguments, len(batch), call_sync)
        return [self._judged({name: rewards[name][i] for name in rewards}, log, i) for i in range(len(batch))]

    def _arguments(self, batch: Sequence[Trajectory], log: _Log) -> dict[str, Any]:
        rows = [columns_of(trajectory) for trajectory in batch]
        names = [name for name in dict.fromkeys(itertools.chain(*rows)) if name not in (*_UNREAD, *_PASSED)]
        columns = {name: [row.get(name) for row in rows] for name in names}
        for parameter, column in self._columns.items():
            if any(column not in row for row in rows):
                text = unknown("column", column, rows[0])
                raise ConfigError(f"scoring.options, scorer {self._spec}: columns.{parameter}: {text}")
            columns[parameter] = [row[column] for row in rows]
        return columns | {
            "prompts": [prompt_of(trajectory) for trajectory in batch],
            "completions": [completion_of(trajectory) for trajectory in batch],
            "completion_ids": [_ids(trajectory) for trajectory in batch],
            "trainer_state": TrainerState(max(trajectory.step for trajectory in batch)),
            "log_extra": log.extra,
            "log_metric": log.metric,
        }

    async def _ask(
        self, function: Callable[..., Any], name: str, passed: Mapping[str, Any], count: int, call_sync: CallSync | None
    ) -> list[float | None]:
        parameters = inspect.signature(function).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            passed = {key: value for key, value in passed.items() if key in parameters}
        for key, parameter in parameters.items():
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if is_named and parameter.default is parameter.empty and key not in passed:
                columns = [column for column in passed if column not in _PASSED]
                option = f"scoring.options.{self._spec.rpartition(':')[2]}.columns.{key}=COLUMN"
                raise PluginError(
                    f"scorer {self._spec}: {name} wants the column {key!r}, which a row lacks or has as null (there are"
                    f" {', '.join(columns)}): give it a default, or set {option}"
                )
        if call_sync is None or _is_async(function):
            result = function(**passed)
        else:
            result = await call_sync(lambda: function(**passed))
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
            raise PluginError(f"scorer {self._spec}: {name} returned {reprlib.repr(result)}, not a list of rewards")
        rewards = [None if _is_nothing(value) else value for value in result]
        if len(rewards) != count:
            raise PluginError(f"scorer {self._spec}: {name} returned {len(rewards)} rewards for {count} completions")
        for value in rewards:
            if value is not None and not _is_finite(value):
                raise PluginError(f"scorer {self._spec}: {name} returned {reprlib.repr(value)}, not a finite number")
        return [None if value is None else float(value) for value in rewards]

    def _judged(self, rewards: Mapping[str, float | None], log: _Log, index: int) -> Score | ScoringFailed:
        values = {name: value for name, value in rewards.items() if value is not None}
        if not values:
            return ScoringFailed(f"scorer {self._spec} says nothing about this sample (None)")
        weights = dict(zip(rewards, self._weights, strict=True))
        parts = dict(log.metrics)
        if len(rewards) > 1:
            parts.update(values)
        remarks = tuple(Remark(name, str(column[index])) for name, column in log.columns.items())
        return Score(sum(weights[name] * value for name, value in values.items()), parts, remarks=remarks)


def is_trl(value: object) -> bool:
    """Whether this is a reward function as TRL takes them, or a list of such."""
    if isinstance(value, list | tuple):
        others = [function for function in value if not is_trl(function)]
        if others and len(others) < len(value):
            raise PluginError(f"a list of reward functions: {_names(others)[0]} takes none of {', '.join(_PASSED)}")
        return bool(value) and not others
    parameters = {} if isinstance(value, type) else parameters_of(value)
    return any(name in parameters for name in _PASSED) and not any(name in parameters for name in _OF_OTHERS)


def columns_of(trajectory: Trajectory) -> dict[str, Any]:
    """The row's columns; `ground_truth` is beside them where the row has no column of that name."""
    sample = trajectory.sample
    columns = {"ground_truth": sample.ground_truth, **sample.info, **to_values(sample)}  # which leaves out nulls
    return {name: value for name, value in columns.items() if name != PLAIN_PROMPT}


def prompt_of(trajectory: Trajectory) -> str | list[dict[str, Any]]:
    """The prompt as the row has it: text, or messages."""
    sample = trajectory.sample
    if sample.info.get(PLAIN_PROMPT) is True:
        return "".join(message.text for message in sample.prompt)
    return [_entry(message) for message in sample.prompt]


def completion_of(trajectory: Trajectory) -> str | list[dict[str, Any]]:
    """All that followed the prompt as messages; for a prompt of plain text what the policy wrote last."""
    if trajectory.sample.info.get(PLAIN_PROMPT) is True:
        return trajectory.answers[-1].text if trajectory.answers else ""
    return [_entry(message) for message in trajectory.messages[len(trajectory.prompt) :]]


def _entry(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role.value, "content": _content(message)}
    if message.tool_calls and all(call.problem is None for call in message.tool_calls):
        # As TRL's parsers have it: the calls beside the text, the thoughts beside both. What cannot be read stays text.
        entry["content"] = message.visible
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        entry["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role is Role.TOOL and message.name is not None:
        entry["name"] = message.name
    return entry


def _content(message: Message) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "text", "text": part.text} if isinstance(part, Text) else {"type": "image", "image": part.source}
        for part in message.content
    ]


def _ids(trajectory: Trajectory) -> list[int]:
    """The tokens after the prompt, replies of tools included; none where an endpoint gave text only."""
    if not trajectory.segments:
        return []
    ledger = trajectory.segments[trajectory.turns[-1].segment if trajectory.turns else 0]
    written = (ledger.origins != Origin.PROMPT).nonzero()[0]
    return [int(token) for token in ledger.token_ids[written[0] :]] if written.size else []


def _names(functions: Sequence[Any]) -> list[str]:
    """What TRL calls them in its metrics; a name that comes again gets a number."""
    names: list[str] = []
    for function in functions:
        plain = str(getattr(function, "__name__", type(function).__name__))
        before = sum(name == plain or name.startswith(f"{plain}_") for name in names)
        names.append(f"{plain}_{before + 1}" if plain in names else plain)
    return names


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, numbers.Real) and math.isnan(value))


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
