"""Gymnasium environments in words: an answer is an action, a reply describes the observation, rewards are added up."""

import dataclasses
import inspect
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

from turnwise.config import Config
from turnwise.config.knobs import is_plugin
from turnwise.errors import ConfigError, EpisodeError, PluginError
from turnwise.errors.nearest_name import unknown
from turnwise.rollout import plugin_calls
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.environments import Observation, Opening, play
from turnwise.rollout.loops.loading import Loop
from turnwise.rollout.plugin_options import read_settings
from turnwise.rollout.toolbox.toolbox import CLOSE_SECONDS
from turnwise.system.plugins import load
from turnwise.types import Message, Role, Sample

if TYPE_CHECKING:
    import gymnasium


class GymLoop:
    """Plays one episode of `rollout.agent_options.env`."""

    def for_run(self, config: Config) -> Loop:
        """The loop of the configured environment."""
        options = GymOptions.of(config.rollout.agent_options)

        async def play_gym(chat: Conversation) -> None:
            await play(chat, GymEnvironment(options, chat.sample, chat.seed))

        return play_gym


gym_env = GymLoop()


WHO = "gym_env"
MARK = "action:"
LONGEST_ACTION = 10_000
_COLOUR = re.compile(r"\x1b\[([0-9;]{0,20})m")
T = TypeVar("T")


class NoAction(Exception):
    """The answer holds no action; the text tells the policy what one is."""


@dataclass(frozen=True, slots=True)
class GymOptions:
    """The options of the loop: `rollout.agent_options={env: FrozenLake-v1, env_kwargs: {render_mode: ansi}}`."""

    env: str
    """A registered id, or module:function that makes an environment."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Given to it."""
    describe: str | None = None
    """module:function from (observation, env) to text; null takes an observation that is text, or the text that
    `render()` gives."""
    actions: dict[str, Any] | str | None = None
    """Actions by the name that the policy writes, or module:function from (answer, env) to an action, which raises
    ValueError for none; null takes numbers for a Discrete space and the text itself for a Text space."""
    seed: Literal["sample", "episode"] = "sample"
    """Whether siblings start alike, or each episode has a start of its own."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Seconds for one step."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "GymOptions":
        """The options of a config, checked."""
        if "env" not in options:
            raise ConfigError(f"agent loop {WHO!r} needs rollout.agent_options={{env: FrozenLake-v1}}")
        return read_settings(cls, dict(options), f"agent loop {WHO!r}")


class GymEnvironment:
    """One environment for one episode. What blocks runs in a thread, one at a time; it is closed on every path."""

    def __init__(self, options: GymOptions, sample: Sample, episode_seed: int) -> None:
        self._options, self._sample = options, sample
        self._seed = (zlib.crc32(sample.id.encode()) if options.seed == "sample" else episode_seed) % 2**31
        self._env: gymnasium.Env[Any, Any] | None = None
        # Held by whoever works with the environment: a step whose episode has left may still run when it is closed.
        self._busy = threading.Lock()
        self._total = 0.0

    async def start(self) -> Opening:
        """The sample's prompt, with the first observation at the end of it; rows may give extra_info.reset_options."""
        extra = self._sample.info.get("extra_info", {})
        reset_options, seed = extra.get("reset_options"), extra.get("seed", self._seed)
        if not isinstance(reset_options, dict | None) or isinstance(seed, bool) or not isinstance(seed, int):
            raise EpisodeError(f"{WHO}: sample {self._sample.id}: extra_info.reset_options is an object, seed a number")

        def begin() -> str:
            self._env = make_env(self._options)
            observation, _ = self._env.reset(seed=seed, options=reset_options)
            return self._describe(observation)

        text = await self._run(begin, "reset")
        *before, last = self._sample.prompt
        if last.role is Role.USER and isinstance(last.content, str):
            return Opening([*before, dataclasses.replace(last, content=f"{last.content}\n\n{text}")])
        return Opening([*before, last, Message(Role.USER, text)])

    async def step(self, message: Message) -> Observation:
        """One step; an answer without an action is told so, and nothing happens."""

        def act() -> tuple[str, float, bool, dict[str, float]]:
            env = self._opened()
            action = self._read(message.visible[-LONGEST_ACTION:])
            observation, reward, terminated, truncated, _ = env.step(action)
            ends = {"terminated": float(terminated), "truncated": float(truncated)}
            return self._describe(observation), float(reward), bool(terminated or truncated), ends

        try:
            text, reward, ended, ends = await self._run(act, "step")
        except NoAction as problem:
            messages = [Message(Role.USER, str(problem))]
            return Observation(messages, False, None, self._total, {"no_action": 1.0})
        if not abs(reward) < 1e300:
            raise EpisodeError(f"{WHO}: {self._options.env} gave the reward {reward}, not a finite number")
        self._total += reward
        return Observation([Message(Role.USER, text)], ended, reward, self._total, {"steps": 1.0, **ends})

    async def close(self) -> None:
        def end() -> bool:
            if not self._busy.acquire(timeout=CLOSE_SECONDS):
                return False
            try:
                if self._env is not None:
                    self._env.close()
            finally:
                self._busy.release()
            return True

        try:
            is_closed = await plugin_calls.in_thread(end)
        except Exception as error:  # a user's code
            raise EpisodeError(f"{WHO}: closing {self._options.env}: {type(error).__name__}: {error}") from error
        if not is_closed:
            raise EpisodeError(f"{WHO}: {self._options.env} is still at work {CLOSE_SECONDS:g} s after its episode")

    async def _run(self, work: Callable[[], T], what: str) -> T:
        def alone() -> T:
            with self._busy:
                return work()

        plugin_calls.check_leaked()
        try:
            return await plugin_calls.in_task(plugin_calls.in_thread(alone), self._options.timeout)
        except (NoAction, PluginError, ConfigError, EpisodeError):
            raise
        except plugin_calls.TookTooLong as error:
            limit = f"{self._options.timeout:g} s"
            raise EpisodeError(f"{WHO}: {what} of {self._options.env} took longer than {limit}") from error
        except Exception as error:  # the environment's code: this episode fails, with its name
            name = f"{WHO}: {what} of {self._options.env}"
            raise EpisodeError(f"{name}: {type(error).__name__}: {error}") from error

    def _opened(self) -> "gymnasium.Env[Any, Any]":
        if self._env is None:
            raise EpisodeError(f"{WHO}: {self._options.env} was not started")
        return self._env

    def _describe(self, observation: Any) -> str:
        env, spec = self._opened(), self._options.describe
        if spec is not None:
            text = load(spec, "describe")(observation, env)
        else:
            text = observation if isinstance(observation, str) else env.render()
        if not isinstance(text, str):
            raise PluginError(
                f"agent loop {WHO!r}: {self._options.env} gives no text ({type(text).__name__}): set "
                "rollout.agent_options.describe to a function from (observation, env) to text, or env_kwargs to "
                "{render_mode: ansi}"
            )
        # In a terminal a colour marks where the player is; in words, brackets do.
        return _COLOUR.sub(lambda code: "]" if code[1] in ("", "0") else "[", text).strip("\n")

    def _read(self, answer: str) -> Any:
        env, actions = self._opened(), self._options.actions
        if isinstance(actions, str):
            try:
                return load(actions, "actions")(answer, env)
            except ValueError as error:
                raise NoAction(f"{error}") from error
        return read_action(answer, env.action_space, actions)


def make_env(options: GymOptions) -> "gymnasium.Env[Any, Any]":
    """The environment of an id or of a function of the user's."""
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise ConfigError(f"agent loop {WHO!r} needs gymnasium: pip install 'turnwise[gym]'") from error
    if is_plugin(options.env):
        maker = load(options.env, "environment")
        candidate = maker(**options.env_kwargs)
        if inspect.isawaitable(candidate) or not all(
            hasattr(candidate, name) for name in ("reset", "step", "action_space")
        ):
            raise PluginError(f"{options.env} made a {type(candidate).__name__}, which is not a Gymnasium environment")
        env: gymnasium.Env[Any, Any] = candidate
        return env
    try:
        return gymnasium.make(options.env, **options.env_kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        raise ConfigError(f"{WHO}: {unknown('environment', options.env, gymnasium.registry)}") from error


def read_action(answer: str, space: Any, named: Mapping[str, Any] | None) -> Any:
    """The action after the last `Action:`, or else all that is said; NoAction says what is wanted."""
    from gymnasium import spaces

    at = answer.casefold().rfind(MARK)
    words = answer[at + len(MARK) :].strip() if at >= 0 else answer.strip()
    if isinstance(space, spaces.Text) and named is None:
        if space.contains(words):
            return words
        raise NoAction(f"That is no action: write at most {space.max_length} of the characters that are allowed.")
    line = words.split("\n", 1)[0].strip(" .*`\"'").casefold()
    for name, action in (named or {}).items():
        if name.casefold() == line:
            return action
    if isinstance(space, spaces.Discrete):
        first, last = int(space.start), int(space.start + space.n) - 1
        if line.isdecimal() and len(line) < 10 and first <= int(line) <= last:
            return int(line)
        wanted = f"one of {', '.join(named)}" if named else f"a number from {first} to {last}"
    elif named:
        wanted = f"one of {', '.join(named)}"
    else:
        raise PluginError(
            f"agent loop {WHO!r}: actions of {space} are not read from words: set rollout.agent_options.actions"
        )
    raise NoAction(f"No action was read. Write a last line `Action: ...` with {wanted}.")
