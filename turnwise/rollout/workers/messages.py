"""What a run and its episode workers tell each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.config import Config, SamplingConfig
from turnwise.engines.samplers.request import NoiseKey, SamplingParams
from turnwise.engines.samplers.sampler import Capabilities
from turnwise.ledger import MediaSpan
from turnwise.scoring.failures import ScoringStats
from turnwise.system.metrics import Metric
from turnwise.types import Completion, Sample, Trajectory


@dataclass(frozen=True, slots=True)
class SamplerTraits:
    """What an episode has to know of the sampler that another process has."""

    context_length: int
    capabilities: Capabilities


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a worker: all that it makes its tools, users and scorers from."""

    path: list[str]
    """Where Python looks for modules."""
    config: Config
    workers: int
    samples: Mapping[str, Sequence[Sample]]
    """By split, one sample of each route: what names it uses is loaded before the first episode."""
    sampler: SamplerTraits | None
    """None where each worker opens the engine itself: an endpoint or a script."""
    watched: bool
    """Somebody looks on: the worker tells now and then what is being played."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Which episodes a context of the run plays: of this split, drawn this way."""

    split: str
    sampling: SamplingConfig
    scored: bool
    """The workers score them too."""


# --- to a worker -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Play:
    """Play these siblings of a sample, drawn this way; score them where the split's scorer can run there."""

    number: int
    sample: Sample
    prompt: Sequence[int] | None
    """The ids of its first prompt, where the run has rendered it."""
    siblings: Sequence[int]
    step: int
    split: str
    sampling: SamplingConfig
    scored: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Break off a Play; it is answered with Raised."""

    number: int


@dataclass(frozen=True, slots=True)
class Written:
    """The answer to an Ask, and how much of its time was waiting for a place or for weights."""

    number: int
    completion: Completion
    waited: float


@dataclass(frozen=True, slots=True)
class Waited:
    """Seconds that asks under way have waited so far, by number."""

    seconds: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class End:
    """Close everything and end the process."""


# --- from a worker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """Everything is loaded and started; `notes` are what tools said of themselves."""

    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn to write: the request, of whose tokens and images those that the run was told with an earlier Ask of the
    conversation are left out."""

    number: int
    conversation: str
    known: int
    """Tokens that were told before: all of the last Ask, or none."""
    token_ids: NDArray[np.int64]
    params: SamplingParams
    noise: NoiseKey
    media: tuple[MediaSpan, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody waits for an Ask any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Release:
    """A conversation will not be continued."""

    conversation: str


@dataclass(frozen=True, slots=True)
class Played:
    """The episodes of a Play have ended, and are being scored: there is room for others."""

    number: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The episodes of a Play, and what the worker counted since the last one."""

    number: int
    trajectories: list[Trajectory]
    scoring: ScoringStats
    counts: Sequence[Metric] = ()


@dataclass(frozen=True, slots=True)
class MadeRows:
    """Rows of the run's files for groups that were sent and scored."""

    groups: Sequence[int]
    """Numbers of Plays that no more rows will come of."""
    made: Sequence[int]
    """Those of them whose rows these are, one group after the other."""
    content: bytes | None
    """None where the run has to make them itself."""
    entries: Sequence[Mapping[str, Any]]
    """What the index says of each row."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """The worker lives; what it plays as underway.json has it, or nothing where nobody looks on."""

    episodes: Mapping[str, Any] = field(default_factory=dict)


# --- both ways -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Raised:
    """A Play, an Ask or the Setup (number -1) raised this."""

    number: int
    error: BaseException


SETUP = -1
"""The number of the Setup in Raised."""
