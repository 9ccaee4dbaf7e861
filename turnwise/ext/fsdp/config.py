"""The section `fsdp`: how the ranks of a learner share its state."""

from dataclasses import dataclass
from typing import ClassVar

from turnwise.config.knobs import at_least, knob, was
from turnwise.config.marks import may_change


@dataclass
class FsdpConfig:
    """A learner over several processes; `learner.processes` says how many (docs/ext/fsdp.md)."""

    EVERY_KNOB: ClassVar = (may_change(),)

    replicas: int = knob(1, at_least(1, 1024))
    """Whole copies of the learner's state, each shared out over learner.processes / replicas of the processes (HSDP).
    Raise it to the number of nodes where a node has room for a copy: then only gradients travel between them."""
    context_parallel: int = knob(1, at_least(1, 1024), was("learner.context_parallel"))
    """Processes that share the tokens of each sequence, so that one may be as many times longer. Before attention they
    exchange tokens for heads: it must divide the query heads. Raise it when a sequence does not fit a process."""
