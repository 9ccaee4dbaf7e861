"""Every knob, once: the config tree as dataclasses. `turnwise.compose` fills it, `turnwise check` shows it."""

from dataclasses import dataclass, field
from typing import Any

from turnwise.choices import (
    Advantage,
    Aggregation,
    Correction,
    Credit,
    Decay,
    EngineName,
    Excess,
    ExcessCalls,
    HistoryPolicy,
    Keep,
    KLControl,
    KLEstimator,
    OldLogprobs,
    Overlong,
    PolicyLoss,
    Precision,
    Resume,
    SandboxLevel,
    ScoringRun,
)


def only(key: str, *values: str) -> dict[str, Any]:
    """Metadata: this knob is read only when another has one of these values ("*" means: when it is set)."""
    return {"only": (key, values)}


RENDERING = ("torch", "scripted")
"""Engines whose prompts we render and count ourselves; an endpoint does that on its side."""


@dataclass
class ModelConfig:
    """Which model."""

    path: str = field(default="tiny", metadata=only("engine.name", *RENDERING))
    """A Hugging Face folder or hub id, or `tiny` for the embedded model."""
    precision: Precision = field(default=Precision.float32, metadata=only("engine.name", "torch"))
    """The number format the sampler computes in; what is trained is float32 always."""


@dataclass
class ChatConfig:
    """How messages become tokens."""

    template: str | None = field(default=None, metadata=only("engine.name", *RENDERING))
    """A built-in name (`chatml_hermes`) or a Jinja file; null uses the model's own."""
    template_kwargs: dict[str, Any] = field(default_factory=dict, metadata=only("engine.name", *RENDERING))
    """Passed to the template, such as {enable_thinking: false}."""
    tool_format: str = "hermes"
    """How the model writes tool calls; a file of turnwise/chat/formats."""
    history: HistoryPolicy = field(default=HistoryPolicy.refuse, metadata=only("engine.name", *RENDERING))
    """What happens when the template would rewrite earlier messages."""


@dataclass
class DataConfig:
    """Where samples come from."""

    train_files: list[str] = field(default_factory=list)
    """verl-shaped parquet or jsonl files; empty uses the task's own generator."""
    eval_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"
    """The column that holds the messages."""
    max_prompt_tokens: int = field(default=1024, metadata=only("engine.name", *RENDERING))
    """Longer prompts are handled by `overlong`."""
    overlong: Overlong = field(default=Overlong.filter, metadata=only("engine.name", *RENDERING))


@dataclass
class EngineConfig:
    """What runs the model."""

    name: EngineName = EngineName.torch
    max_batch: int = field(default=64, metadata=only("engine.name", "torch"))
    """Most sequences decoded together."""
    threads: int = field(default=0, metadata=only("engine.name", "torch"))
    """CPU threads; 0 measures and takes the fastest count that gives reproducible sums."""
    base_url: str | None = field(default=None, metadata=only("engine.name", "openai"))
    """An OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."""
    model: str | None = field(default=None, metadata=only("engine.name", "openai"))
    """The model's name there; null asks the endpoint, which must serve exactly one."""
    api_key_env: str = field(default="OPENAI_API_KEY", metadata=only("engine.name", "openai"))
    """The environment variable that holds the key."""
    timeout_seconds: float = field(default=120.0, metadata=only("engine.name", "openai"))
    retries: int = field(default=3, metadata=only("engine.name", "openai"))
    script: list[str] = field(default_factory=list, metadata=only("engine.name", "scripted"))
    """What the scripted sampler says, turn by turn; the last line repeats."""


@dataclass
class SamplingConfig:
    """How one assistant turn is drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = field(default=0, metadata=only("engine.name", *RENDERING))
    """0 considers every token."""
    max_tokens: int = 128
    """Most tokens of one assistant turn."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a turn, kept in the text."""


@dataclass
class RolloutConfig:
    """How an episode runs and what ends it. Null budgets are unlimited."""

    agent: str | None = None
    """Loop for rows that name none: single_turn, tool_calling, module:function; null infers it from tools and
    interaction."""
    tools: list[str] = field(default_factory=list)
    """Built-in names, module:function or file.py:function."""
    interaction: str | None = None
    """A simulated user for rows that name none: a built-in name, a name from `interactions_file`, module:Class."""
    interaction_kwargs: dict[str, Any] = field(default_factory=dict, metadata=only("rollout.interaction", "*"))
    """Config of that interaction, such as {max_turns: 2}."""
    interactions_file: str | None = None
    """A verl-style YAML registry of interactions."""
    max_assistant_turns: int | None = 16
    max_user_turns: int | None = None
    """Messages of the simulated user; tool replies do not count."""
    max_parallel_calls: int = 8
    excess_calls: ExcessCalls = ExcessCalls.refuse
    max_malformed_calls: int = 3
    """Turns in a row whose only calls cannot be parsed."""
    max_tokens: int | None = None
    """Tokens after the first prompt: the policy's, the tools' and the user's together."""
    max_seconds: float | None = 600.0
    """Wall time of one episode, tools included."""
    max_tool_reply_chars: int = 2048
    keep: Keep = Keep.both
    tool_timeout: float | None = None
    """Seconds for every tool; null uses each tool's own."""
    concurrency: int = 256
    """Episodes under way at once."""
    max_failures: float = 0.5
    """Share of failed episodes above which the run stops."""


LOCAL = ("sandbox.url", "None")


@dataclass
class SandboxConfig:
    """Where the code that a model writes is run."""

    level: SandboxLevel = field(default=SandboxLevel.auto, metadata=only(*LOCAL))
    """Exactly this one, or the highest that can be proven."""
    min_level: SandboxLevel = SandboxLevel.L2
    """Below this no code is run."""
    stateless: bool = False
    """Forget variables and files after each call."""
    seconds: float = 10.0
    """Of one call; then it is interrupted."""
    memory_mb: int = field(default=512, metadata=only(*LOCAL))
    """Beyond what the preloaded packages take."""
    scratch_mb: int = field(default=64, metadata=only(*LOCAL))
    """Of the files of one session."""
    preload: list[str] = field(
        default_factory=lambda: ["numpy", "sympy", "pandas", "PIL.Image", "matplotlib.pyplot"], metadata=only(*LOCAL)
    )
    """Packages that every session has loaded."""
    warm: int = field(default=8, metadata=only(*LOCAL))
    """Sessions made ahead of need."""
    url: str | None = None
    """A sandbox server's address instead of this machine, such as http://sandbox:8080."""
    token_env: str = field(default="TURNWISE_SANDBOX_TOKEN", metadata=only("sandbox.url", "*"))
    """The environment variable that holds the server's token."""


@dataclass
class ScoringConfig:
    """What a trajectory is worth."""

    scorers: dict[str, str] = field(default_factory=dict)
    """Scorer by data source: a built-in name or module:function. The key "default" serves all others."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options by scorer, such as {gsm8k: {wrong: -0.1}}."""
    weights: dict[str, float] = field(default_factory=dict)
    """By part: the reward is then the weighted sum of the parts; those not named count fully."""
    run: ScoringRun = ScoringRun.inline
    """How scorers are run."""
    workers: int = field(default=0, metadata=only("scoring.run", "pool", "http"))
    """Processes of the pool, or requests under way; 0 takes the number of cores, and 32 requests."""
    timeout: float = field(default=30.0, metadata=only("scoring.run", "pool", "http", "batch"))
    """Seconds for one trajectory (for a whole batch with `batch`)."""
    retries: int = field(default=3, metadata=only("scoring.run", "pool", "http", "batch"))
    """How often a failure of the machinery is tried again."""
    url: str | None = field(default=None, metadata=only("scoring.run", "http"))
    """The reward server's address, such as http://127.0.0.1:8200."""
    token_env: str = field(default="TURNWISE_REWARD_TOKEN", metadata=only("scoring.run", "http"))
    """The environment variable that holds the server's token."""
    batch_size: int = field(default=64, metadata=only("scoring.run", "batch"))
    """Most trajectories given to a batch scorer in one call."""
    max_failures: float = 0.2
    """Share of a step's trajectories whose scoring may fail; above it the run stops."""


@dataclass
class EvalConfig:
    """One evaluation."""

    samples: int | None = 128
    """Samples evaluated, from the start; null takes all."""
    group_size: int = 1
    """Episodes per sample."""
    dump_jsonl: str | None = None
    """Also write readable JSONL here."""


@dataclass
class SftConfig:
    """Supervised fine-tuning on recorded or scripted trajectories."""

    steps: int = 2000
    batch_tokens: int = 8192
    """Tokens packed into one batch."""
    lr: float = 2e-3
    warmup: int = 50
    weight_decay: float = 0.01
    script: str | None = None
    """Who writes the traces to learn from: module:function giving a Script."""
    traces: int = 2000
    """Scripted episodes, one per training sample."""
    recorded: list[str] = field(default_factory=list)
    """Parquet files of recorded trajectories to learn from instead of a script."""
    min_reward: float | None = field(default=None, metadata=only("sft.recorded", "*"))
    """Leave out recorded trajectories below this reward."""
    out: str = "sft"
    """Folder for the trained model, under the current folder."""


@dataclass
class TrainingConfig:
    """The training loop: how much, how often, when to stop."""

    steps: int = 40
    groups: int = 12
    """Samples per step."""
    group_size: int = 8
    """Episodes per sample; the others of its group are an episode's baseline."""
    epochs: int = 1
    """Passes over a step's episodes."""
    minibatches: int = 1
    """Weight updates per pass."""
    max_lag: int = 0
    """Steps by which collection may run ahead of the weights; 0 is on-policy."""
    samples: int | None = 4096
    """Samples to train on, from the start of the files or the generator; null takes all."""
    shuffle: bool = True
    """Shuffle them anew each epoch, from `seed`."""
    eval_every: int = 10
    """Steps between evaluations; 0 evaluates before and after only."""
    save_every: int = 10
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 2
    """Checkpoints kept."""
    target: float | None = None
    """Evaluation accuracy at which the run ends early."""
    max_minutes: float | None = None
    """Wall time after which the run ends cleanly."""
    max_tokens: int | None = None
    """Policy tokens after which the run ends cleanly."""
    drop_constant_groups: bool = False
    """Draw on until the step has enough groups whose rewards differ (dynamic sampling)."""
    max_draws: int = field(default=3, metadata=only("training.drop_constant_groups", "True"))
    """At most this many times `groups` samples a step."""
    parity: float = 1e-3
    """Largest difference between the sampler's and the learner's log-probs accepted before the first update."""
    drift: float = field(default=0.05, metadata=only("algorithm.old_logprobs", "learner"))
    """Mean difference between them above which a step warns."""


@dataclass
class AlgorithmConfig:
    """From rewards to the gradient."""

    advantage: Advantage = Advantage.grpo
    credit: Credit = Credit.uniform
    turn_weight: float = field(default=0.5, metadata=only("algorithm.credit", "turn"))
    """What a turn's own score is worth beside the reward."""
    turn_gamma: float = field(default=0.0, metadata=only("algorithm.credit", "turn"))
    """How much a turn answers for the scores of those after it: 0 for its own only, 1 for all."""
    loss: PolicyLoss = PolicyLoss.ppo_clip
    aggregation: Aggregation = Aggregation.token_mean
    aggregation_length: int = field(default=1024, metadata=only("algorithm.aggregation", "sequence_sum_norm"))
    """The constant that sums are divided by."""
    clip_low: float = field(default=0.2, metadata=only("algorithm.loss", "ppo_clip", "gspo", "cispo"))
    clip_high: float = field(default=0.2, metadata=only("algorithm.loss", "ppo_clip", "gspo", "cispo"))
    clip_dual: float = field(default=3.0, metadata=only("algorithm.loss", "ppo_clip"))
    gamma: float = field(default=1.0, metadata=only("algorithm.advantage", "gae", "reinforce_pp"))
    lam: float = field(default=1.0, metadata=only("algorithm.advantage", "gae"))
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""
    kl_loss: float = 0.0
    """Coefficient of a KL loss against the reference policy; 0 needs no reference."""
    kl_loss_estimator: KLEstimator = field(default=KLEstimator.k3, metadata=only("algorithm.kl_loss", "*"))
    kl_reward: float = 0.0
    """Coefficient of a KL penalty in the reward."""
    kl_reward_estimator: KLEstimator = field(default=KLEstimator.k1, metadata=only("algorithm.kl_reward", "*"))
    kl_control: KLControl = field(default=KLControl.fixed, metadata=only("algorithm.kl_reward", "*"))
    kl_target: float = field(default=0.1, metadata=only("algorithm.kl_control", "adaptive"))
    kl_horizon: int = field(default=10000, metadata=only("algorithm.kl_control", "adaptive"))
    value_loss: float = field(default=1.0, metadata=only("algorithm.advantage", "gae"))
    value_clip: float = field(default=0.5, metadata=only("algorithm.advantage", "gae"))
    old_logprobs: OldLogprobs = OldLogprobs.sampler
    correction: Correction = field(default=Correction.none, metadata=only("algorithm.old_logprobs", "learner"))
    correction_mode: Excess = field(
        default=Excess.truncate, metadata=only("algorithm.correction", "token", "sequence", "geometric")
    )
    correction_threshold: float = field(
        default=2.0, metadata=only("algorithm.correction", "token", "sequence", "geometric")
    )
    overlong_tokens: int = 0
    """Length of the zone before `rollout.max_tokens` in which the reward falls; 0 switches it off."""
    overlong_penalty: float = field(default=1.0, metadata=only("algorithm.overlong_tokens", "*"))


@dataclass
class LearnerConfig:
    """How weights change."""

    lr: float = 1e-5
    critic_lr: float = field(default=1e-4, metadata=only("algorithm.advantage", "gae"))
    shared_critic: bool = field(default=False, metadata=only("algorithm.advantage", "gae"))
    """Put the value head on the policy's own trunk instead of a copy."""
    weight_decay: float = 0.0
    warmup: int = 0
    """Updates of linear warm-up."""
    decay: Decay = Decay.constant
    grad_clip: float = 1.0
    token_budget: int = 8192
    """Tokens of one forward pass; a batch is worked off in as many as it needs."""
    gradient_checkpointing: bool = False
    device: str = "cpu"
    """Where gradients are computed: cpu or cuda. The sampler stays on the CPU."""
    precision: Precision | None = None
    """Of the learner's matrix products; null takes bfloat16 on a GPU and float32 elsewhere."""
    lora_rank: int = 0
    """0 trains all weights."""
    lora_alpha: float = field(default=32.0, metadata=only("learner.lora_rank", "*"))


@dataclass
class TrackingConfig:
    """Where a training's numbers go beside metrics.jsonl, which has them always."""

    to: list[str] = field(default_factory=lambda: ["console"])
    """Any of console, tensorboard, wandb, mlflow; one that fails is switched off and never stops training."""
    project: str = "turnwise"
    """The project in Weights & Biases, the experiment in MLflow."""


@dataclass
class Config:
    """The whole tree."""

    task: str | None = "arithmetic"
    """A file of turnwise/tasks or a module; it brings data, tools, interaction and scorers. Null for none."""
    run: str | None = None
    """Name of the run directory; null makes one from the command and the time."""
    runs_dir: str = "runs"
    resume: Resume = Resume.never
    """For `turnwise train run=NAME`: go on with an existing run."""
    train: bool = True
    """`turnwise train train=false` only evaluates."""
    board: bool = False
    """Beside a training run: serve the board in a process of its own, and say where."""
    board_port: int = field(default=7007, metadata=only("board", "*"))
    """A free one is taken when another program has it."""
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
