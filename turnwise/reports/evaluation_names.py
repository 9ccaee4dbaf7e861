"""The numbers that the evaluations of a training will have, known before its first: what `training.ship` may name."""

import re

from turnwise.config.training import GREEDY
from turnwise.errors import ConfigError
from turnwise.errors.nearest_name import unknown
from turnwise.reports.pass_at_k import REPEATED, tries
from turnwise.reports.task_metrics import COUNT, TASK, declared_by, names_of
from turnwise.rollout.prepare import Prepared

_REPEATED = re.compile(rf"({'|'.join(map(re.escape, REPEATED))})(\d+)(/.*)?")


def evaluation_names(heldout: Prepared) -> list[str]:
    """Every number that weights can be compared by: over all held-out samples, and `NAME/SOURCE` of a data source."""
    config, sources = heldout.config, sorted({sample.data_source for sample in heldout.samples})
    ends = ["", *(f"/{source}" for source in sources)]
    declared = declared_by(config.task)
    measured = [f"{kind}{end}" for kind in ("accuracy", "reward") for end in ends]
    measured += [f"first_accuracy/{source}" for source in sources]
    measured += [
        f"{TASK}/{source}/{name}" for source in sources for name in names_of(source, declared) if name != COUNT
    ]
    several = tries(config.eval.group_size)
    of_source = [f"{name}{k}" for k in several for name in REPEATED]
    of_all = [f"{name}{k}" for k in several[-1:] for name in REPEATED]
    again = [*of_all, *(f"{name}/{source}" for source in sources for name in of_source)]
    return [*measured, *again, *(f"{GREEDY}{name}" for name in measured)]


def check_shipping(heldout: Prepared) -> None:
    """Refuse a `training.ship` that names no number of these evaluations."""
    training = heldout.config.training
    names = evaluation_names(heldout)
    if training.metric in names:
        return
    match = _REPEATED.fullmatch(training.metric)
    if match is not None and int(match[2]) > 1 and int(match[2]) != heldout.config.eval.group_size:
        raise ConfigError(f"training.ship={training.metric}: evaluations have it with eval.group_size={match[2]}")
    raise ConfigError(
        f"training.ship: {unknown('number', training.metric, names)} It is best (by accuracy), last or a number of "
        "evaluations"
    )
