"""Simulated users: the registry of interactions and one user's part in one episode."""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from turnwise.config import RolloutConfig
from turnwise.errors import ConfigError, EpisodeError, PluginError, TurnwiseError, nearest, unknown
from turnwise.knobs import is_plugin
from turnwise.plugins import LONGEST_NAME, builtin, load, names_in, unnamed
from turnwise.rollout import plugin_calls
from turnwise.rollout.interactions.base import BaseInteraction, Seen
from turnwise.rollout.toolbox import CLOSE_SECONDS
from turnwise.rollout.tools.tool import as_json, as_number
from turnwise.strict_yaml import read_yaml
from turnwise.types import InteractionSpec, Message, Role, Sample

_PACKAGE = "turnwise.rollout.interactions"
_METHODS = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")

FACTS = ("name", "query", "ground_truth")
"""Of a row's interaction_kwargs: what every interaction may be given, as verl's rows have it."""
LONGEST_REPLY = 500_000
"""Characters of one message of a user: more would keep the event loop busy for many seconds, and fits no context."""


class Interaction(Protocol):
    """What is asked of an interaction object; verl's classes fit as they are."""

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str: ...
    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class Interactions:
    """Interactions by name, each made once: from the YAML registry, the built-in folder, or module:Class."""

    def __init__(self, config: RolloutConfig, own: Interaction | type | None = None) -> None:
        """`own` is a program's, and replaces the configured one."""
        self._config = config
        self._made: dict[str, Interaction] = {}
        self._registered = {} if config.interactions_file is None else read_registry(Path(config.interactions_file))
        if own is not None:
            name = own.__name__ if isinstance(own, type) else str(getattr(own, "name", type(own).__name__))
            options = {**config.interaction_kwargs, "name": name}
            self._made[name] = _build(own, name, options) if isinstance(own, type) else _checked_instance(own, name)
            self._config = replace(config, interaction=name)

    @property
    def names(self) -> list[str]:
        """Every name a row may use."""
        return sorted({*self._registered, *(name for name in names_in(_PACKAGE) if name != "base")})

    def get(self, name: str) -> Interaction:
        """The interaction of a name. Code is imported only where the config names it."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def unread(self, name: str, sample: Sample) -> str | None:
        """What a row gives the interaction of this name and it does not read; None when all is well."""
        given = sample.info.get("interaction_kwargs", {}) if sample.interaction is None else sample.interaction.kwargs
        words = [key for key in given if key not in FACTS]
        if not words:
            return None
        kind = type(self.get(name))
        own: tuple[str, ...] | None = None if name in self._registered else vars(kind).get("reads_kwargs")
        reads = _named_by(kind) if own is None else frozenset(own)
        key = next((key for key in words if reads is not None and key not in reads), None)
        if key is None or reads is None:
            return None
        hint = nearest(key[:LONGEST_NAME], [*reads, *FACTS])
        return f"interaction {name!r} does not read interaction_kwargs.{key[:LONGEST_NAME]}: {hint}"

    def spec_for(self, sample: Sample) -> InteractionSpec | None:
        """The sample's own interaction, or the configured one for samples that name none."""
        if sample.interaction is not None:
            return InteractionSpec(sample.interaction.name, _with_facts(sample.interaction.kwargs, sample))
        if self._config.interaction is None:
            return None
        return InteractionSpec(self._config.interaction, _with_facts(sample.info.get("interaction_kwargs", {}), sample))

    def _make(self, name: str) -> Interaction:
        options = dict(self._config.interaction_kwargs) if name == self._config.interaction else {}
        if name in self._registered:
            return self._registered[name](options)
        if is_plugin(name):
            if name != self._config.interaction:
                keys = "rollout.interaction=...", "rollout.interactions_file=FILE"
                raise PluginError(unnamed("interaction", name, self.names, *keys))
            kind = load(name, "interaction")
        elif name in self.names:
            kind = builtin(_PACKAGE, name, "interaction", leave_out=("base",)).INTERACTION
        else:
            raise PluginError(unknown("interaction", name[:LONGEST_NAME], self.names))
        return _build(kind, name, {**options, "name": name})


def read_registry(path: Path) -> dict[str, Callable[[dict[str, Any]], Interaction]]:
    """Makers by name from verl's YAML: a list `interaction` of {name?, class_name, config}.

    Classes are looked for beside the YAML file too, whatever folder the command runs in.
    """
    if not path.is_file():
        raise ConfigError(f"rollout.interactions_file: no file {path} (from {Path.cwd()})")
    content = read_yaml(path)
    entries = content.get("interaction") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a non-empty list under the key 'interaction'")
    makers: dict[str, Callable[[dict[str, Any]], Interaction]] = {}
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


def _build_registered(kind: type, name: str, base: dict[str, Any], options: dict[str, Any]) -> Interaction:
    return _build(kind, name, {**base, **options})


def _checked_class(kind: Any, name: str) -> type:
    if not isinstance(kind, type):
        raise PluginError(f"interaction {name!r}: {kind!r} is not a class")
    missing = [method for method in _METHODS if not callable(getattr(kind, method, None))]
    if missing:
        raise PluginError(f"interaction {name!r}: {kind.__name__} has no {', '.join(missing)}")
    return kind


def _checked_instance(own: Interaction, name: str) -> Interaction:
    _checked_class(type(own), name)
    return own


def _build(kind: Any, name: str, config: dict[str, Any]) -> Interaction:
    try:
        made: Interaction = _checked_class(kind, name)(config)
    except TurnwiseError:
        raise
    except Exception as error:  # a user's code, run before anything else: its author reads the message
        raise PluginError(f"interaction {name!r}: {kind.__name__}(config) failed: {error!r}") from error
    return made


def _with_facts(kwargs: dict[str, Any], sample: Sample) -> dict[str, Any]:
    """The row's kwargs, with query and ground truth filled in where it gives none."""
    query = next((m.text for m in reversed(sample.prompt) if m.role is Role.USER), "")
    return {"query": query, "ground_truth": sample.ground_truth, **kwargs}


class InteractionSession:
    """One interaction in one episode. Errors of its code become EpisodeErrors that name it."""

    def __init__(self, interaction: Interaction, spec: InteractionSpec, instance_id: str, sample: Sample) -> None:
        self.instance_id = instance_id
        self.notes: list[dict[str, Any]] = []
        self.began = False
        """Whether `start` came to its end, so that the user can be asked."""
        self._interaction = interaction
        self._name = spec.name
        # The episode's own copy: what an interaction changes in it is not seen by siblings.
        self._kwargs = {**copy.deepcopy(spec.kwargs), "name": spec.name}
        self._sample = sample
        self._open = False

    async def start(self) -> None:
        """Begin; from here on `finish` must be called."""
        self._open = True
        given = await self._call("start_interaction", (self.instance_id,), self._kwargs)
        if given is not None and (not isinstance(given, str) or not given):
            raise self._wrong("start_interaction", given, "the instance id as text, or None to keep the one given")
        self.instance_id = given or self.instance_id
        self.began = True

    async def respond(self, messages: list[Message], answers: list[Message]) -> tuple[bool, str, float | None]:
        """(the user ends the episode, what is said, the score of the last answer); `answers` are the policy's."""
        said = [{"role": message.role.value, "content": message.text} for message in messages]
        kwargs = self._kwargs
        if getattr(self._interaction, "sees_episode", False):
            kwargs = {**kwargs, "seen": Seen(self._sample, tuple(messages), tuple(answers))}
        value = await self._call("generate_response", (self.instance_id, said), kwargs)
        match value:
            case (bool() as end, str() as text, score, extra):
                if len(text) > LONGEST_REPLY:
                    wanted = f"at most {LONGEST_REPLY} characters"
                    raise self._wrong("generate_response", f"{len(text)} characters", wanted)
                self._note(extra)
                return end, text, self._score("generate_response", score)
        shape = "(should_terminate: bool, text: str, score: float | None, extra: dict)"
        raise self._wrong("generate_response", value, shape)

    async def finish(self, *, scored: bool) -> float | None:
        """The episode's score where it is wanted, after which the interaction forgets the episode."""
        if not self._open:
            return None
        score = None
        try:
            if scored and self.began:
                value = await self._call("calculate_score", (self.instance_id,), seconds=CLOSE_SECONDS)
                score = self._score("calculate_score", value)
        finally:
            await self._call("finalize_interaction", (self.instance_id,), seconds=CLOSE_SECONDS)
        return score

    def _note(self, extra: Any) -> None:
        if extra is None or (isinstance(extra, dict) and not extra):
            return
        note = as_json(extra)
        if not isinstance(note, dict):
            raise self._wrong("generate_response", extra, "a dict of JSON values as its last part")
        self.notes.append(note)

    def _score(self, method: str, value: Any) -> float | None:
        if value is None:
            return None
        score = as_number(value)
        if score is None:
            raise self._wrong(method, value, "a finite number or None as the score")
        return score

    def _wrong(self, method: str, value: Any, wanted: str) -> EpisodeError:
        return EpisodeError(f"interaction {self._name!r}: {method} returned {repr(value)[:200]}, not {wanted}")

    async def _call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, seconds: float | None = None
    ) -> Any:
        function = getattr(self._interaction, method)
        try:
            takes = _takes(type(self._interaction), method)
            if seconds is None:  # closing is never refused
                plugin_calls.check_leaked()
            given, named = args[: takes.positional], takes.named(kwargs or {})
            if takes.ours:
                return await function(*given, **named)
            return await plugin_calls.in_task(plugin_calls.call(function, *given, **named), seconds)
        except (EpisodeError, PluginError):
            raise
        except plugin_calls.TookTooLong as error:
            raise EpisodeError(f"interaction {self._name!r}: {method} took longer than {seconds:g} s") from error
        except plugin_calls.PluginCallError as error:
            raise EpisodeError(f"interaction {self._name!r}: {method}: {error}") from error
        except Exception as error:  # a user's code: this episode fails, with its name
            raise EpisodeError(f"interaction {self._name!r}: {method}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Takes:
    """What a method can be given: verl's own base class takes no instance id in two methods."""

    positional: int
    names: frozenset[str] | None
    """None: any."""
    ours: bool
    """Whether it is a built-in interaction's, which neither hangs nor blocks."""

    def named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs if self.names is None else {key: kwargs[key] for key in kwargs if key in self.names}


def _named_by(kind: type) -> frozenset[str] | None:
    """The row's kwargs that a class of the user's takes by name in either method; None where one takes any."""
    names = [_takes(kind, method).names for method in ("start_interaction", "generate_response")]
    return None if None in names else frozenset().union(*(one for one in names if one is not None))


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
    inherited = getattr(kind, method) is getattr(BaseInteraction, method, None)
    ours = inherited or kind.__module__.rpartition(".")[0] == BaseInteraction.__module__.rpartition(".")[0]
    return _Takes(own if spread else min(own, len(positional)), None if any_name else frozenset(named), ours)
