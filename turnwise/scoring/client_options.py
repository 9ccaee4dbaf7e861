"""What a scorer declares of itself: which options somebody else may set, where it leads, what one process must count.

Somebody else is a client of a reward server, or the config of a run that was sent. They may set what only says how a
result is counted. What names code, an address, a file, an environment variable or a sandbox level, or takes the
machine's time, is for whoever runs the scorer to say.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from turnwise.errors import ConfigError
from turnwise.scoring.scorer import ScorerSpec, builtin_scorers
from turnwise.system.plugins import load

Function = TypeVar("Function", bound=Callable[..., Any])
_ATTRIBUTE = "turnwise_declared"


Refuse = Callable[[Mapping[str, Any], str], None]


@dataclass(frozen=True, slots=True)
class _Declared:
    options: frozenset[str] = frozenset()
    contacts: bool = False
    one_process: Refuse | None = None


def client_options(
    *names: str, contacts: bool = False, one_process: Refuse | None = None
) -> Callable[[Function], Function]:
    """Declare them beside the scorer: `@client_options("correct", "wrong")`; without it, it takes none.

    `contacts`: it sends episodes to an address, perhaps one that the environment names. `one_process` raises
    ConfigError for options (with the words for who asks from several) that hold within one process only.
    """

    def mark(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, _Declared(frozenset(names), contacts, one_process))
        return function

    return mark


def _declared(scorer: str) -> _Declared:
    """What this scorer declares; it is imported for that."""
    declared: _Declared = getattr(load(builtin_scorers().get(scorer, scorer), "scorer"), _ATTRIBUTE, _Declared())
    return declared


def declared_options(scorer: str) -> frozenset[str]:
    """The options of this scorer that somebody else may set."""
    return _declared(scorer).options


def contacts_others(scorer: str) -> bool:
    """Whether this scorer sends episodes to an address."""
    return _declared(scorer).contacts


def check_processes(spec: ScorerSpec, where: str) -> None:
    """ConfigError for options that cannot hold where several processes score, as `where` says."""
    refuse = _declared(spec.name).one_process
    if refuse is not None:
        refuse(spec.options, where)


def check_client_options(scorer: str, options: Mapping[str, Any], allowed: frozenset[str]) -> None:
    """ConfigError with its name for the first option that a client may not set."""
    for key, value in options.items():
        if key not in allowed:
            ScorerSpec(scorer, {key: value}).make()  # a misspelt one is said to be that
            hint = f"it takes {', '.join(sorted(allowed))}" if allowed else "it takes none"
            raise ConfigError(
                f"scorer {scorer}: the option {key!r} cannot be set by a client ({hint}); set it where the "
                "server is started: RewardServerSettings.options"
            )
