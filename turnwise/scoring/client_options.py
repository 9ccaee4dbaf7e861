"""Which options of a scorer somebody else may set: a client of a reward server, or the config of a run that was sent.

Those that only say how a result is counted. What names code, an address, a file, an environment variable or a sandbox
level, or takes the machine's time, is for whoever runs the scorer to say.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from turnwise.errors import ConfigError
from turnwise.scoring.scorer import ScorerSpec, builtin_scorers
from turnwise.system.plugins import load

Function = TypeVar("Function", bound=Callable[..., Any])
_ATTRIBUTE = "turnwise_client_options"


def client_options(*names: str) -> Callable[[Function], Function]:
    """Declare them beside the scorer: `@client_options("correct", "wrong")`; without it, it takes none."""

    def mark(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, frozenset(names))
        return function

    return mark


def declared_options(scorer: str) -> frozenset[str]:
    """What this scorer declares; it is imported for that."""
    declared: frozenset[str] = getattr(load(builtin_scorers().get(scorer, scorer), "scorer"), _ATTRIBUTE, frozenset())
    return declared


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
