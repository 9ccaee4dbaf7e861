"""Simulated users: the registry of interactions and one user's part in one episode."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from turnwise.config import RolloutConfig
from turnwise.errors import ConfigError, EpisodeError, PluginError, unknown
from turnwise.plugins import builtin, load, names_in
from turnwise.types import InteractionSpec, Message, Role, Sample

_PACKAGE = "turnwise.rollout.interactions"
_METHODS = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")


class Interaction(Protocol):
    """What is asked of an interaction object; verl's classes fit as they are."""

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str: ...
    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class Interactions:
    """Interactions by name, each made once: from the YAML registry, the built-in folder, or module:Class."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._made: dict[str, Interaction] = {}
        self._registered = {} if config.interactions_file is None else read_registry(Path(config.interactions_file))

    @property
    def names(self) -> list[str]:
        """Every name a row may use."""
        return sorted({*self._registered, *(name for name in names_in(_PACKAGE) if name != "base")})

    def get(self, name: str) -> Interaction:
        """The interaction of a name."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

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
        if ":" in name or "." in name:
            kind = load(name, "interaction")
        elif name in self.names:
            kind = builtin(_PACKAGE, name, "interaction", leave_out=("base",)).INTERACTION
        else:
            raise PluginError(unknown("interaction", name, self.names))
        return _build(kind, name, {**options, "name": name})


def read_registry(path: Path) -> dict[str, Callable[[dict[str, Any]], Interaction]]:
    """Makers by name from verl's YAML: a list `interaction` of {name?, class_name, config}.

    Classes are looked for beside the YAML file too, whatever folder the command runs in.
    """
    if not path.is_file():
        raise ConfigError(f"rollout.interactions_file: no file {path} (from {Path.cwd()})")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    entries = content.get("interaction") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a non-empty list under the key 'interaction'")
    makers: dict[str, Callable[[dict[str, Any]], Interaction]] = {}
    for number, entry in enumerate(entries):
        where = f"{path}: interaction[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise ConfigError(f"{where} needs a class_name such as package.module.Class")
        for key in entry:
            if key not in ("name", "class_name", "config"):
                raise ConfigError(f"{where}: {unknown('key', str(key), ('name', 'class_name', 'config'))}")
        kind = load(entry["class_name"], "interaction", near=path.resolve().parent)
        name = entry.get("name") or kind.__name__.removesuffix("Interaction").lower()
        if name in makers:
            raise ConfigError(f"{where}: the name {name!r} is taken")
        base = {**(entry.get("config") or {}), "name": name}
        makers[name] = functools.partial(_build_registered, kind, name, base)
    return makers


def _build_registered(kind: Any, name: str, base: dict[str, Any], options: dict[str, Any]) -> Interaction:
    return _build(kind, name, {**base, **options})


def _build(kind: Any, name: str, config: dict[str, Any]) -> Interaction:
    if not isinstance(kind, type) or not all(callable(getattr(kind, method, None)) for method in _METHODS):
        raise PluginError(f"interaction {name!r}: {kind!r} is not a class with {', '.join(_METHODS)}")
    try:
        made: Interaction = kind(config)
    except (TypeError, ValueError, KeyError) as error:
        raise PluginError(f"interaction {name!r}: {kind.__name__}(config) failed: {error!r}") from error
    return made


def _with_facts(kwargs: dict[str, Any], sample: Sample) -> dict[str, Any]:
    """The row's kwargs, with query and ground truth filled in where it gives none."""
    query = next((m.text for m in reversed(sample.prompt) if m.role is Role.USER), "")
    return {"query": query, "ground_truth": sample.ground_truth, **kwargs}


@dataclass(slots=True)
class SimulatedUser:
    """One interaction in one episode. Errors of its code become EpisodeErrors that name it."""

    interaction: Interaction
    spec: InteractionSpec
    instance_id: str
    started: bool = False
    notes: list[dict[str, Any]] = field(default_factory=list)

    async def start(self) -> None:
        """Begin; from here on `finish` must be called."""
        self.started = True
        given = await self._call("start_interaction", self.instance_id, name=self.spec.name, **self.spec.kwargs)
        if isinstance(given, str):
            self.instance_id = given

    async def respond(self, messages: list[Message]) -> tuple[bool, str, float | None]:
        """(the user ends the episode, what is said, the score of the last answer)."""
        said = [_as_dict(message) for message in messages]
        value = await self._call("generate_response", self.instance_id, said, name=self.spec.name, **self.spec.kwargs)
        match value:
            case (bool() as end, str() as text, (int() | float() | None) as score, extra):
                if isinstance(extra, dict) and extra:
                    self.notes.append(extra)
                return end, text, None if score is None else float(score)
        shape = "(should_terminate: bool, text: str, score: float | None, extra: dict)"
        raise EpisodeError(f"interaction {self.spec.name!r}: generate_response returned {value!r}, not {shape}")

    async def finish(self) -> float | None:
        """The episode's score, after which the interaction forgets it; the latter happens on every path."""
        if not self.started:
            return None
        self.started = False
        try:
            score = await self._call("calculate_score", self.instance_id)
        finally:
            await self._call("finalize_interaction", self.instance_id)
        return None if score is None else float(score)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self.interaction, method)
        try:
            value = function(*_accepted(function, args), **_accepted_names(function, kwargs, len(args)))
            return await value if inspect.isawaitable(value) else value
        except EpisodeError:
            raise
        except Exception as error:  # a stranger's code: this episode fails, with its name
            raise EpisodeError(f"interaction {self.spec.name!r}: {method}: {type(error).__name__}: {error}") from error


def _accepted(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """verl's own base class takes no instance id in two methods; give what the signature takes."""
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return args
    positional = [k for k in kinds if k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    return args[: len(positional)]


def _accepted_names(function: Callable[..., Any], kwargs: dict[str, Any], taken: int) -> dict[str, Any]:
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return kwargs
    named = {p.name for p in parameters[taken:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in kwargs.items() if name in named}


def _as_dict(message: Message) -> dict[str, Any]:
    return {"role": message.role.value, "content": message.text}
