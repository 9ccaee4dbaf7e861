"""What a rank of a sharded learner opens, and where: plain data that goes to another process or machine."""

from dataclasses import dataclass

from turnwise.config import LearnerConfig
from turnwise.config.choices import ModelImplementation
from turnwise.engines.model.sources import ModelSource
from turnwise.ledger import Media


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The same for every rank of a learner."""

    source: ModelSource
    """Each rank reads the model's files itself."""
    implementation: ModelImplementation
    learner: LearnerConfig
    """Its `device` is not read: a rank has one of its own."""
    temperature: float
    seed: int
    updates: int = 0
    critic: bool = False
    reference: bool = False
    picture: Media | None = None
    """A small one, for finding out whether the model makes of an image what its own code makes of it."""
    replicas: int = 1
    """Whole copies of the state that the ranks hold together; those of one copy have numbers that follow each other."""
    context: int = 1
    """Ranks that share every pass, a slice of its tokens each; their numbers follow each other."""
    published: str = "float32"
    """The number format that weights are given in, as torch calls it: the sampler's, so that no more travels than it
    keeps."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of a group: `RankPlace(0, 2, "file:///tmp/meeting", "cpu")`."""

    rank: int
    size: int
    rendezvous: str
    """Where the ranks meet: file://PATH, or tcp://HOST:PORT across machines, where somebody serves a torch TCPStore."""
    device: str
    """cpu, or cuda:N."""
    threads: int = 1
    """Of the CPU."""
