"""The whole config: every section once, as dataclasses. `compose.py` fills them, `turnwise config` documents them."""

from dataclasses import dataclass, field

from turnwise.config.choices import Resume
from turnwise.config.data import DataConfig
from turnwise.config.engine import EngineConfig, SamplingConfig
from turnwise.config.knobs import at_least, harmless, knob, leads_away, name_of, only, path, reaches, was
from turnwise.config.marks import changes_work, may_change
from turnwise.config.model import ChatConfig, ModelConfig
from turnwise.config.rollout import EvalConfig, RolloutConfig
from turnwise.config.scoring import ScoringConfig
from turnwise.config.training import AlgorithmConfig, LearnerConfig, SftConfig, TrackingConfig, TrainingConfig

__all__ = [
    "AlgorithmConfig", "ChatConfig", "Config", "DataConfig", "EngineConfig", "EvalConfig", "LearnerConfig",
    "ModelConfig", "RolloutConfig", "SamplingConfig", "ScoringConfig", "SftConfig", "TrackingConfig", "TrainingConfig",
]  # fmt: skip

ONE_MACHINE = "none"
"""`cluster` where everything runs on this machine."""


@dataclass
class Config:
    """The whole config: what a run is made of, by section."""

    task: str | None = knob("arithmetic", path(), reaches("code", leads_away), changes_work())
    """A built-in task, my_task.py or module:NAME; it gives rows, tools, interaction and scorer. Set it to null
    when data.train_files or data.eval_files and scoring.scorers say everything."""
    profile: str | None = knob(None, harmless())
    """Values for other keys that fit a machine: laptop, one_gpu, eight_gpus, several_nodes, or a YAML
    file of your own. A config file and the command line override it. Set it first on a new machine, and
    look at `turnwise train --dry-run`."""
    run: str | None = knob(None, harmless(), may_change())
    """Name of the run directory; null makes one from the command and the time. Set it to find, and resume, the run."""
    runs_dir: str = knob("runs", harmless(), may_change())
    """The folder of all runs, under the current one. Set it to keep them on another disk."""
    resume: Resume = knob(Resume.never, only("run", "*"), may_change())
    """What `turnwise train run=NAME` does when that run exists. Set `auto` to resume it."""
    cluster: str = knob(
        ONE_MACHINE,
        name_of("places", {ONE_MACHINE: "On this machine."}),
        harmless(),
        was("cluster.name"),
        may_change(),
        changes_work(),
    )
    """On which machines samplers, learner, scorers and sandboxes run. Set it to use more than this one."""
    seed: int = knob(0, at_least(0))
    """Seed of generated samples, shuffling, sampling and tools. Change it to repeat a run with other random numbers."""
    model: ModelConfig = field(default_factory=ModelConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
