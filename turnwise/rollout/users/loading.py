"""Simulated users by name: built in, brought by an extension, of a registry file, or a user's own function or class."""

import inspect
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from turnwise.config import Config
from turnwise.config.knobs import is_plugin
from turnwise.errors import PluginError, TurnwiseError
from turnwise.errors.nearest_name import nearest, unknown
from turnwise.extensions import named
from turnwise.rollout.plugin_options import keyword_options, read_files
from turnwise.rollout.users.user import ClassUser, FunctionUser, User, is_user_class
from turnwise.system.plugins import LONGEST_NAME, adapted, builtin, load, names_in, unnamed
from turnwise.types import InteractionSpec, Role, Sample

_PACKAGE = "turnwise.rollout.users"
_PARTS = ("episode_user", "loading", "user")
"""Modules of the package that are no users."""
_OPTIONS = "rollout.interaction_kwargs"

FACTS = ("name", "query", "ground_truth")
"""Of a row's interaction_kwargs: what every user may be given."""
READS = "READS"
"""The name under which the file of a function says what it reads of a row's interaction_kwargs beside the facts."""
MakeUser = Callable[[dict[str, Any]], User]


class Users:
    """The users of a run by name, each made once."""

    def __init__(self, config: Config, own: object | None = None) -> None:
        """`own` is a program's, and replaces the configured one."""
        self._config = config.rollout
        self._made: dict[str, User] = {}
        self._registered: dict[str, MakeUser] = read_files(config, "user_files")
        if own is not None:
            name = str(getattr(own, "__name__", None) or getattr(own, "name", type(own).__name__))
            self._made[name] = as_user(own, name, self._config.interaction_kwargs)
            self._config = replace(self._config, interaction=name)

    @property
    def names(self) -> list[str]:
        """Every user that a row may name: those of files, built-in ones and the extensions'."""
        return sorted({*self._registered, *builtin_users(), *brought_users()})

    def get(self, name: str) -> User:
        """The user of a name. Code is imported only where the config names it."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def unread(self, name: str, sample: Sample) -> str | None:
        """What a row gives the user of this name and it does not read; None when all is well."""
        kwargs = sample.info.get("interaction_kwargs", {}) if sample.interaction is None else sample.interaction.kwargs
        words = [key for key in kwargs if key not in FACTS]
        if not words:
            return None
        reads: tuple[str, ...] | None = getattr(self.get(name), "reads_kwargs", None)
        key = next((key for key in words if reads is not None and key not in reads), None)
        if key is None or reads is None:
            return None
        hint = nearest(key[:LONGEST_NAME], [*reads, *FACTS])
        own = is_plugin(name) or name not in self.names
        how = f" Its file says what it reads of rows: {READS} = ({key[:LONGEST_NAME]!r},)" if own and not reads else ""
        return f"interaction {name!r} does not read interaction_kwargs.{key[:LONGEST_NAME]}: {hint}{how}"

    def spec_for(self, sample: Sample) -> InteractionSpec | None:
        """The sample's own user, or the configured one for samples that name none."""
        if sample.interaction is not None:
            return InteractionSpec(sample.interaction.name, _with_facts(sample.interaction.kwargs, sample))
        if self._config.interaction is None:
            return None
        return InteractionSpec(self._config.interaction, _with_facts(sample.info.get("interaction_kwargs", {}), sample))

    def _make(self, name: str) -> User:
        options = dict(self._config.interaction_kwargs) if name == self._config.interaction else {}
        if name in self._registered:
            return self._registered[name](options)
        if is_plugin(name):
            if name != self._config.interaction:
                keys = "rollout.interaction=...", *(f"{key}=FILE" for key in named("user_files"))
                raise PluginError(unnamed("interaction", name, self.names, *keys))
            return as_user(load(name, "interaction"), name, options)
        if (spec := brought_users().get(name)) is not None:
            return as_user(load(spec, "interaction"), name, options)
        if name not in builtin_users():
            raise PluginError(unknown("interaction", name[:LONGEST_NAME], self.names))
        module = vars(builtin(_PACKAGE, name, "interaction", leave_out=_PARTS))
        return as_user(module[name], name, options)


def builtin_users() -> list[str]:
    """Names of the built-in users: the folder is the registry."""
    return [name for name in names_in(_PACKAGE) if name not in _PARTS]


def brought_users() -> dict[str, str]:
    """`module:object` of the users that extensions bring, by name."""
    return named("users", builtin_users())


def as_user(value: object, name: str, options: Mapping[str, Any]) -> User:
    """The user of a function or class of our contract, or of what an extension knows; a user object as it is."""
    who = f"interaction {name}"
    if inspect.isclass(value) and callable(getattr(value, "open", None)):
        user: User = _made(value, name, keyword_options(value, options, who, _OPTIONS))
        return user
    if is_user_class(value):
        chosen = keyword_options(value, options, who, _OPTIONS)  # type: ignore[arg-type]  # it is a class
        _made(value, name, chosen)  # what cannot be made is found out before the run
        return ClassUser(value, chosen)  # type: ignore[arg-type]
    if isinstance(value, User) and not inspect.isclass(value):
        return value
    if inspect.isroutine(value):
        return FunctionUser(value, _function_options(value, name, options), _reads(value, name))
    ours = adapted("user", value, {"name": name, "options": dict(options)})
    if ours is not None:
        return ours  # type: ignore[no-any-return]
    raise PluginError(
        f"interaction {name!r}: {reprlib.repr(value)} is not a user: write async def user(turn), or a class with reply"
    )


def _function_options(function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError(f"interaction {name!r} is a generator: a user must return its reply, once a turn")
    values = keyword_options(function, options, f"interaction {name}", _OPTIONS)
    try:
        inspect.signature(function).bind(None, **values)
    except TypeError as error:
        problem = f"interaction {name!r} must take the turn, and options by keyword only: {error}"
        raise PluginError(problem) from error
    return values


def _reads(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """What the file of a function says that it reads; nothing where it says nothing."""
    reads = getattr(inspect.unwrap(function), "__globals__", {}).get(READS, ())
    if not isinstance(reads, list | tuple) or not all(isinstance(key, str) for key in reads):
        raise PluginError(f"interaction {name!r}: {READS} is a tuple of names of interaction_kwargs, not {reads!r:.80}")
    return tuple(reads)


def _made(kind: Any, name: str, options: Mapping[str, Any]) -> Any:
    try:
        return kind(**options)
    except TurnwiseError:
        raise
    except Exception as error:  # a user's code, run before anything else: its author reads the message
        raise PluginError(f"interaction {name!r}: making {kind.__name__} failed: {error!r}") from error


def _with_facts(kwargs: dict[str, Any], sample: Sample) -> dict[str, Any]:
    """The row's kwargs, with query and ground truth filled in where it gives none."""
    query = next((m.text for m in reversed(sample.prompt) if m.role is Role.USER), "")
    return {"query": query, "ground_truth": sample.ground_truth, **kwargs}
