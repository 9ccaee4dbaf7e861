"""The loop of a task written as functions: `start` opens a session, `obs` answers each action, `end` closes it."""

import inspect
import uuid
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from turnwise.data.prompts import read_prompt
from turnwise.data.values import FieldError
from turnwise.errors import EpisodeError, PluginError, one_line
from turnwise.rollout import plugin_calls
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.environments import Observation, Opening, play
from turnwise.rollout.openai_messages import assistant_entry
from turnwise.rollout.toolbox.toolbox import CLOSE_SECONDS
from turnwise.rollout.tools.tool import as_number
from turnwise.system.plugins import load
from turnwise.types import EnvironmentRecord, Message, Sample

_live: set[tuple[str | None, str | int]] = set()
"""Sessions under way, by their start function: two episodes that share one would mix what each is worth."""


def _loadable(spec: str) -> str:
    if not callable(load(spec, "task function")):
        raise PluginError(f"task function {spec!r} must be a function")
    return spec


Function = Annotated[str, AfterValidator(_loadable)]
"""`module:name`, loaded when the options are read: a wrong one is found before the run."""


async def task_functions(chat: Conversation, *, start: Function, obs: Function, end: Function | None = None) -> None:
    """Play a task by its functions, each `module:name` or `file.py:name`, async or not.

    `start(**row)` returns `prompt_ids` or `messages` (and `tools`), and a `sid` if not the one it was given. Ids:
    `obs(action_ids, sid)` returns `done` and the `ids` to go on from. Messages: `obs(message, sid)` returns `finish`
    (or `done`) and `messages`. `end(sid, done)` is called on every path. All other numbers, and those under
    `metrics`, are summed by name; `reward` is the episode's, the last one said.
    """
    session = _Session(chat, start, obs, end)
    opened = await session.start()
    if "prompt_ids" in opened:
        await _play_ids(chat, session, opened)
    else:
        await play(chat, _Environment(session, opened))


class _Session:
    """One episode of a task: its functions, its sid, and what they reported."""

    def __init__(self, chat: Conversation, start: str, obs: str, end: str | None) -> None:
        self._chat, self._names = chat, {"start": start, "obs": obs, "end": end}
        self._functions = {what: load(name, what) for what, name in self._names.items() if name is not None}
        self.sid: Any = uuid.uuid4().hex
        self.done = False
        self._opened = False

    async def start(self) -> dict[str, Any]:
        """What `start` says; from here on `close` must be called."""
        answer = await self._call(
            "start", None, **_accepted(self._functions["start"], row_of(self._chat.sample, self.sid))
        )
        if not isinstance(answer, Mapping):
            raise EpisodeError(f"{self._names['start']} returned {type(answer).__name__}, not a mapping")
        self.sid = answer.get("sid", self.sid)
        if not isinstance(self.sid, str | int):
            raise EpisodeError(f"{self._names['start']}: a sid is text or a number, not {self.sid!r:.80}")
        key = (self._names["start"], self.sid)
        if key in _live:  # the other's to end
            raise EpisodeError(f"{key[0]} gave the sid {self.sid!r} to two episodes at once: use the sid it receives")
        _live.add(key)
        self._opened = True
        return dict(answer)

    async def obs(self, action: Any) -> dict[str, Any]:
        """What `obs` says to an action."""
        answer = await self._call("obs", None, action, self.sid)
        if not isinstance(answer, Mapping):
            raise EpisodeError(f"{self._names['obs']} returned {type(answer).__name__}, not a mapping")
        values = dict(answer)
        done = values.pop("finish", values.pop("done", None))
        if not isinstance(done, bool):
            raise EpisodeError(f"{self._names['obs']}: done is {done!r:.80}, not True or False")
        self.done = done
        return values

    async def close(self) -> dict[str, float]:
        """Calls the task's `end` once, if the session was opened; returns its metrics."""
        if not self._opened:
            return {}
        self._opened = False
        _live.discard((self._names["start"], self.sid))
        if "end" not in self._functions:
            return {}
        answer = await self._call("end", CLOSE_SECONDS, self.sid, self.done)
        return {} if answer is None else self.metrics(answer, "end")

    def metrics(self, answer: Any, what: str) -> dict[str, float]:
        """The numbers in an answer, `reward` left out."""
        if not isinstance(answer, Mapping):
            raise EpisodeError(f"{self._names[what]} returned {type(answer).__name__}, not a mapping")
        nested = answer.get("metrics") or {}
        if not isinstance(nested, Mapping):
            raise EpisodeError(f"{self._names[what]}: metrics are numbers by name, not {nested!r:.80}")
        plain = ("prompt_ids", "ids", "messages", "tools", "sid", "metrics", "reward")
        totals: dict[str, float] = {}
        for name, value in (*((n, v) for n, v in answer.items() if n not in plain), *nested.items()):
            number = as_number(value)
            if number is None:
                raise EpisodeError(f"{self._names[what]}: the metric {name!r} is {value!r:.80}, not a finite number")
            totals[str(name)] = totals.get(str(name), 0.0) + number
        return totals

    def reward(self, answer: Mapping[str, Any]) -> float | None:
        """The reward an answer tells of."""
        if answer.get("reward") is None:
            return None
        number = as_number(answer["reward"])
        if number is None:
            raise EpisodeError(f"{self._names['obs']}: the reward is {answer['reward']!r:.80}, not a finite number")
        return number

    async def _call(self, what: str, seconds: float | None, *args: Any, **kwargs: Any) -> Any:
        """A user's function, whatever kind it is; what it raises ends the episode by name."""
        try:
            return await plugin_calls.in_task(plugin_calls.call(self._functions[what], *args, **kwargs), seconds)
        except plugin_calls.TookTooLong as error:
            raise EpisodeError(f"{self._names[what]} took longer than {seconds:g} s") from error
        except (EpisodeError, PluginError):
            raise
        except Exception as error:  # a user's code: recorded on the trajectory
            raise EpisodeError(f"{self._names[what]}: {one_line(error)}") from error


async def _play_ids(chat: Conversation, session: _Session, opened: dict[str, Any]) -> None:
    record = chat.facts.environment = EnvironmentRecord()
    totals = record.metrics
    try:
        _add(totals, session.metrics(opened, "start"))
        ids = _ids(opened["prompt_ids"], "prompt_ids")
        while not session.done:
            action = (await chat.generate_ids(ids)).token_ids.tolist()
            observation = await session.obs(list(action))
            _add(totals, session.metrics(observation, "obs"))
            reward = chat.turns[-1].user_score = session.reward(observation)
            record.reward = record.reward if reward is None else reward
            if session.done or chat.cut is not None:
                break
            ids = [*ids, *action, *_ids(observation.get("ids"), "ids")]
    finally:
        record.finished = session.done
        try:
            _add(totals, await plugin_calls.to_the_end(session.close()))
        except EpisodeError as error:  # what ended the episode is what counts; that something is left open is kept
            record.left_open = str(error)


class _Environment:
    """Functions as the environment of a chat."""

    def __init__(self, session: _Session, opened: dict[str, Any]) -> None:
        self._session, self._opened = session, opened
        self._total: float | None = None

    async def start(self) -> Opening:
        messages = _messages(self._opened.get("messages"))
        metrics = self._session.metrics(self._opened, "start")
        return Opening(messages, list(self._opened.get("tools") or ()), metrics)

    async def step(self, message: Message) -> Observation:
        observation = await self._session.obs(assistant_entry(message.visible, message.tool_calls))
        reward = self._session.reward(observation)
        self._total = self._total if reward is None else reward
        messages = _messages(observation["messages"]) if observation.get("messages") else []
        metrics = self._session.metrics(observation, "obs")
        if self._session.done:  # so that what `end` reports is counted with the last observation
            for name, value in (await self._session.close()).items():
                metrics[name] = metrics.get(name, 0.0) + value
        return Observation(messages, self._session.done, reward, self._total, metrics)

    async def close(self) -> None:
        await self._session.close()


def row_of(sample: Sample, sid: str) -> dict[str, Any]:
    """What `start` is given: the row's columns, its extra_info, and a sid of this episode alone."""
    prompt = [{"role": message.role.value, "content": message.text} for message in sample.prompt]
    return {
        **sample.info,
        "sid": sid,
        "sample_id": sample.id,
        "data_source": sample.data_source,
        "prompt": prompt,
        "ground_truth": sample.ground_truth,
    }


def _accepted(function: Callable[..., Any], row: dict[str, Any]) -> dict[str, Any]:
    """The part of a row that a function names; all of it for one that takes anything."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return row
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def _ids(value: Any, what: str) -> list[int]:
    ids = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(ids, list | tuple) or not all(type(number) is int and number >= 0 for number in ids) or not ids:
        raise EpisodeError(f"{what} must be token ids to go on from, not {ids!r:.80}")
    return list(ids)


def _messages(value: Any) -> list[Message]:
    try:
        return list(read_prompt(value, "messages", None)[0])
    except FieldError as error:
        raise EpisodeError(f"{error.field}: {error.problem}") from error


def _add(totals: dict[str, float], metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        totals[name] = totals.get(name, 0.0) + value
