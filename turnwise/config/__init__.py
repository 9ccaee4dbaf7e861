"""Every knob, once: the config tree as dataclasses. `turnwise.compose` fills it, `turnwise config` documents it."""

from dataclasses import dataclass, field

from turnwise.choices import Resume
from turnwise.config.episodes import CompatConfig, EvalConfig, RolloutConfig, SandboxConfig, ScoringConfig
from turnwise.config.inputs import ChatConfig, DataConfig, EngineConfig, ModelConfig, SamplingConfig
from turnwise.config.placing import ClusterConfig
from turnwise.config.training import AlgorithmConfig, LearnerConfig, SftConfig, TrackingConfig, TrainingConfig
from turnwise.knobs import at_least, knob, only

__all__ = [
    "AlgorithmConfig", "ChatConfig", "ClusterConfig", "CompatConfig", "Config", "DataConfig", "EngineConfig",
    "EvalConfig", "LearnerConfig", "ModelConfig", "RolloutConfig", "SamplingConfig", "SandboxConfig", "ScoringConfig",
    "SftConfig", "TrackingConfig", "TrainingConfig",
]  # fmt: skip


@dataclass
class Config:
    """The whole tree."""

    task: str | None = "arithmetic"
    """A built-in task, my_task.py or module:NAME; it brings rows, tools, interaction and scorer. Null for none:
    set it so when data.train_files or data.eval_files and scoring.scorers say everything."""
    profile: str | None = None
    """How much of a machine there is, as values for other keys: laptop, one_gpu, eight_gpus, several_nodes, or a YAML
    file of your own. What a config file or the command line says stands over it. Set it first on a new machine, and
    look at `turnwise train --dry-run`."""
    run: str | None = None
    """Name of the run directory; null makes one from the command and the time. Set it to find, and resume, the run."""
    runs_dir: str = "runs"
    """The folder of all runs, under the current one. Set it to keep them on another disk."""
    resume: Resume = knob(Resume.never, only("run", "*"))
    """What `turnwise train run=NAME` does when that run exists. Set `auto` to resume it."""
    board: bool = False
    """Beside a training run: serve the board in a process of its own, and say where. Switch it on to watch live."""
    board_port: int = knob(7007, at_least(0, 65535), only("board", "*"))
    """The board's port; a free one is taken when another program has it. Set it when a tunnel expects another."""
    seed: int = knob(0, at_least(0))
    """Seed of generated samples, shuffling, sampling and tools. Change it to repeat a run with other chances."""
    model: ModelConfig = field(default_factory=ModelConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    compat: CompatConfig = field(default_factory=CompatConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
