"""verl's interactions as simulated users of ours: one object for a run, the episode under its instance id."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from turnwise.config.strict_yaml import read_yaml
from turnwise.errors import ConfigError, EpisodeError, PluginError, TurnwiseError
from turnwise.errors.nearest_name import unknown
from turnwise.rollout import plugin_calls
from turnwise.rollout.users.user import Reply, UserContext, UserSession, UserTurn
from turnwise.system.plugins import load

_METHODS = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")
_SHAPE = "(should_terminate: bool, text: str, score: float | None, extra: dict)"


class BaseInteraction:
    """A user who reads the assistant's answer and says something back, as verl's base class of that name.

    One instance serves all episodes of a run, so state belongs under `instance_id`. Subclasses implement
    `generate_response`; the rest is optional.
    """

    sees_episode: ClassVar[bool] = False
    """Set it to get `seen=UserTurn(...)` in `generate_response`: verl's messages are texts, without calls and reasoning
    told apart."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", type(self).__name__)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode; kwargs are the row's interaction_kwargs. Returns the id to use."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """(end the episode?, what the user says, score of the answer, anything to record)."""
        raise NotImplementedError(f"{type(self).__name__} must implement generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """A score of the whole episode, asked for once at its end; None is no opinion."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the episode; called on every path."""


def verl_user(value: object, name: str, options: Mapping[str, Any]) -> "VerlUser":
    """The user of an interaction class, or of an object of one."""
    if not isinstance(value, type):
        _checked_class(type(value), name)
        return VerlUser(value, name)
    return _build(value, name, {**options, "name": name})


@dataclass(frozen=True, slots=True)
class VerlUser:
    """One object of an interaction class, which serves all episodes of a run."""

    interaction: Any
    name: str
    is_registered: bool = False
    """Whether it comes from a registry file: such a class may read what it does not name."""

    @property
    def reads_kwargs(self) -> tuple[str, ...] | None:
        """The row's kwargs that the class says it reads, or takes by name in either method; None where it takes any."""
        kind: Any = type(self.interaction)
        declared: tuple[str, ...] | None = None if self.is_registered else vars(kind).get("reads_kwargs")
        if declared is not None:
            return declared
        names = [_takes(kind, method).names for method in ("start_interaction", "generate_response")]
        return None if None in names else tuple(sorted({name for each in names for name in each or ()}))

    async def open(self, context: UserContext) -> UserSession:
        return _VerlSession(self, context.id)


@dataclass(slots=True)
class _VerlSession:
    """The interaction in one episode, under the id it was given or has chosen."""

    user: VerlUser
    instance_id: str

    async def start(self, context: UserContext) -> None:
        name = await self._call("start_interaction", (self.instance_id,), context.kwargs)
        if name is not None and (not isinstance(name, str) or not name):
            raise self._wrong("start_interaction", name, "the instance id as text, or None to keep the one given")
        self.instance_id = name or self.instance_id

    async def reply(self, turn: UserTurn) -> Reply:
        messages = [{"role": message.role.value, "content": message.text} for message in turn.messages]
        kwargs = dict(turn.kwargs)
        if getattr(self.user.interaction, "sees_episode", False):
            kwargs["seen"] = turn
        value = await self._call("generate_response", (self.instance_id, messages), kwargs)
        match value:
            case (bool() as end, str() as text, score, extra):
                if extra is not None and not isinstance(extra, Mapping):
                    raise self._wrong("generate_response", extra, "a dict of JSON values as its last part")
                return Reply(text, score, end, extra)
        raise self._wrong("generate_response", value, _SHAPE)

    async def score(self) -> Any:
        return await self._call("calculate_score", (self.instance_id,))

    async def close(self) -> None:
        await self._call("finalize_interaction", (self.instance_id,))

    def _wrong(self, method: str, value: Any, wanted: str) -> EpisodeError:
        return EpisodeError(f"interaction {self.user.name!r}: {method} returned {repr(value)[:200]}, not {wanted}")

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
        interaction = self.user.interaction
        kind: Any = type(interaction)
        takes = _takes(kind, method)
        function = getattr(interaction, method)
        try:
            return await plugin_calls.guarded(
                plugin_calls.call(function, *args[: takes.positional], **takes.named(kwargs or {}))
            )
        except (EpisodeError, PluginError):
            raise
        except plugin_calls.PluginCallError as error:
            raise EpisodeError(f"interaction {self.user.name!r}: {method}: {error}") from error
        except Exception as error:  # a user's code: this episode fails, with its name
            problem = f"{type(error).__name__}: {error}"
            raise EpisodeError(f"interaction {self.user.name!r}: {method}: {problem}") from error


@dataclass(frozen=True, slots=True)
class _Takes:
    """What a method can be given: verl's own base class takes no instance id in two methods."""

    positional: int
    names: frozenset[str] | None
    """None: any."""

    def named(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {key: kwargs[key] for key in kwargs if self.names is None or key in self.names}


@functools.lru_cache(maxsize=256)
def _takes(kind: type, method: str) -> _Takes:
    parameters = list(inspect.signature(getattr(kind, method)).parameters.values())
    unbound = not isinstance(inspect.getattr_static(kind, method), staticmethod | classmethod)
    if unbound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]  # self
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    spread = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    own = 2 if method == "generate_response" else 1  # instance id and messages are passed by position
    named = {p.name for p in positional[own:]} | {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return _Takes(own if spread else min(own, len(positional)), None if any_name else frozenset(named))


# --- verl's registry of interactions ------------------------------------------------------------------------------


def read_registry(path: Path) -> dict[str, Callable[[dict[str, Any]], VerlUser]]:
    """Makers by name from verl's YAML: a list `interaction` of {name?, class_name, config}.

    Classes are looked for beside the YAML file too, whatever folder the command runs in.
    """
    content = read_yaml(path)
    entries = content.get("interaction") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a non-empty list under the key 'interaction'")
    makers: dict[str, Callable[[dict[str, Any]], VerlUser]] = {}
    for number, entry in enumerate(entries):
        where = f"{path}: interaction[{number}]"
        name, kind, base = _read_entry(entry, where, path.resolve().parent)
        if name in makers:
            raise ConfigError(f"{where}: the name {name!r} is taken")
        makers[name] = functools.partial(_build_registered, kind, name, base)
    return makers


def _read_entry(entry: Any, where: str, folder: Path) -> tuple[str, type, dict[str, Any]]:
    """(name, class, config) of one entry of the registry."""
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ConfigError(f"{where} needs a class_name such as package.module.Class")
    for key in entry:
        if key not in ("name", "class_name", "config"):
            raise ConfigError(f"{where}: {unknown('key', str(key), ('name', 'class_name', 'config'))}")
    config = {} if entry.get("config") is None else entry["config"]
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: config must be a mapping, not {config!r}")
    kind = _checked_class(load(entry["class_name"], "interaction", near=folder), entry["class_name"])
    name = entry.get("name")
    if name is None:
        name = kind.__name__.removesuffix("Interaction").lower()
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: name must be text, not {name!r}")
    return name, kind, {**config, "name": name}


def _build_registered(kind: type, name: str, base: dict[str, Any], options: dict[str, Any]) -> VerlUser:
    return _build(kind, name, {**base, **options}, is_registered=True)


def _checked_class(kind: Any, name: str) -> type:
    if not isinstance(kind, type):
        raise PluginError(f"interaction {name!r}: {kind!r} is not a class")
    missing = [method for method in _METHODS if not callable(getattr(kind, method, None))]
    if missing:
        raise PluginError(f"interaction {name!r}: {kind.__name__} has no {', '.join(missing)}")
    return kind


def _build(kind: Any, name: str, config: dict[str, Any], *, is_registered: bool = False) -> VerlUser:
    try:
        return VerlUser(_checked_class(kind, name)(config), name, is_registered)
    except TurnwiseError:
        raise
    except Exception as error:  # a user's code, run before anything else: its author reads the message
        raise PluginError(f"interaction {name!r}: {kind.__name__}(config) failed: {error!r}") from error
