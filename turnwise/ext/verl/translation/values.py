"""What the rules of verl's config share: its sections, its defaults, and what a rule is.

A rule is given the value and the whole config, flat, and gives our keys with their values; a text says that nothing is
needed, and why; `Unsupported` says what to do instead.
"""

from collections.abc import Callable, Mapping
from typing import Any

Flat = Mapping[str, Any]
Rule = Callable[[Any, Flat], dict[str, Any] | str]

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, TURNS = "actor_rollout_ref.model", "actor_rollout_ref.rollout.multi_turn"
GROUPS = 1024
"""verl's default of data.train_batch_size."""


class Unsupported(Exception):
    """A value that nothing here stands for; the text says what instead."""


def to(key: str) -> Rule:
    """The same value under our name."""
    return lambda value, all_: {key: value}
