"""The section `verl`: files of verl's that name loops and users, and where verl is reproduced to the letter."""

from dataclasses import dataclass

from turnwise.config.knobs import knob, path, reaches, was


@dataclass
class VerlConfig:
    """What verl's users bring, and where verl is reproduced although we would do otherwise (docs/ext/verl.md)."""

    strict: bool = knob(False, was("compat.strict"))
    """Treat turns, calls, users and reward functions as verl 0.6.1 does; docs/ext/verl.md has the differences.
    Set it to compare a run with one of verl's, not to train better."""
    agents_file: str | None = knob(None, path(), reaches("code"), was("rollout.agents_file"))
    """A YAML list of agent loops: {name, _target_, ...options}. Set it when rows name loops of your own."""
    interactions_file: str | None = knob(None, path(), reaches("code"), was("rollout.interactions_file"))
    """A YAML registry of interactions, verl's or with functions (docs/users.md). Set it when rows name users of your
    own."""
