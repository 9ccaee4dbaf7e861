"""The section `dpo`: pairs to learn a preference from, and how strongly."""

from dataclasses import dataclass

from turnwise.config.knobs import also, at_least, harmless, knob, more_than, only, path


@dataclass
class DpoConfig:
    """Preferences for `turnwise sft` (docs/ext/dpo.md)."""

    files: list[str] = knob([], path(), harmless())
    """Files of pairs: rows with `chosen` and `rejected`, and `prompt` where they do not hold it. Set it to learn what
    people or a judge preferred."""
    recorded: list[str] = knob([], path(), harmless())
    """Runs whose groups give pairs, as in `sft.recorded`: the best and the worst episode of each group by reward. Set
    it to learn from what a run has played already."""
    margin: float = knob(0.0, at_least(0), only("dpo.recorded", "*"))
    """By how much the rewards of a pair must differ, and at least at all. Raise it to leave out pairs that are about as
    good."""
    beta: float = knob(0.1, more_than(0), only("dpo.files", "*"), also("dpo.recorded", "*"))
    """How dear it is to leave the model that training starts from. Raise it when the answers fall apart, lower it when
    little changes."""
