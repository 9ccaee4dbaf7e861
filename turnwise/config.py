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
from turnwise.knobs import any_number, at_least, duration, knob, more_than, only, share, url

RENDERING = ("torch", "scripted")
"""Engines whose prompts we render and count ourselves; an endpoint does that on its side."""


@dataclass
class ModelConfig:
    """Which model."""

    path: str = knob("tiny", only("engine.name", *RENDERING))
    """A Hugging Face folder or hub id, or `tiny` for the embedded model."""
    precision: Precision = knob(Precision.float32, only("engine.name", "torch"))
    """The number format the sampler computes in; what is trained is float32 always."""


@dataclass
class ChatConfig:
    """How messages become tokens."""

    template: str | None = knob(None, only("engine.name", *RENDERING))
    """A built-in name (`chatml_hermes`) or a Jinja file; null uses the model's own."""
    template_kwargs: dict[str, Any] = field(default_factory=dict, metadata=only("engine.name", *RENDERING))
    """Passed to the template, such as {enable_thinking: false}."""
    tool_format: str = "hermes"
    """How the model writes tool calls; a file of turnwise/chat/formats."""
    history: HistoryPolicy = knob(HistoryPolicy.refuse, only("engine.name", *RENDERING))
    """What happens when the template would rewrite earlier messages."""


@dataclass
class DataConfig:
    """Where samples come from."""

    train_files: list[str] = field(default_factory=list)
    """verl-shaped parquet or jsonl files; empty uses the task's own generator."""
    eval_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"
    """The column that holds the messages."""
    max_prompt_tokens: int = knob(1024, at_least(1), only("engine.name", *RENDERING))
    """Longer prompts are handled by `overlong`."""
    overlong: Overlong = knob(Overlong.filter, only("engine.name", *RENDERING))


@dataclass
class EngineConfig:
    """What runs the model."""

    name: EngineName = EngineName.torch
    max_batch: int = knob(64, at_least(1), only("engine.name", "torch"))
    """Most sequences decoded together."""
    threads: int = knob(0, at_least(0, 1024), only("engine.name", "torch"))
    """CPU threads; 0 measures and takes the fastest count that gives reproducible sums."""
    base_url: str | None = knob(None, url(), only("engine.name", "openai"))
    """An OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."""
    model: str | None = knob(None, only("engine.name", "openai"))
    """The model's name there; null asks the endpoint, which must serve exactly one."""
    api_key_env: str = knob("OPENAI_API_KEY", only("engine.name", "openai"))
    """The environment variable that holds the key."""
    timeout_seconds: float = knob(120.0, duration(), only("engine.name", "openai"))
    retries: int = knob(3, at_least(0), only("engine.name", "openai"))
    script: list[str] = field(default_factory=list, metadata=only("engine.name", "scripted"))
    """What the scripted sampler says, turn by turn; the last line repeats."""


@dataclass
class SamplingConfig:
    """How one assistant turn is drawn."""

    temperature: float = knob(1.0, at_least(0, 100))
    top_p: float = knob(1.0, more_than(0, 1))
    top_k: int = knob(0, at_least(0), only("engine.name", *RENDERING))
    """0 considers every token."""
    max_tokens: int = knob(128, at_least(1))
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
    max_assistant_turns: int | None = knob(16, at_least(1))
    max_user_turns: int | None = knob(None, at_least(0))
    """Messages of the simulated user; tool replies do not count."""
    max_parallel_calls: int = knob(8, at_least(1))
    excess_calls: ExcessCalls = ExcessCalls.refuse
    max_malformed_calls: int = knob(3, at_least(1))
    """Turns in a row whose only calls cannot be parsed."""
    max_tokens: int | None = knob(None, at_least(1))
    """Tokens after the first prompt: the policy's, the tools' and the user's together."""
    max_seconds: float | None = knob(600.0, duration())
    """Of one episode, tools included; waiting for a slot or for new weights is not counted."""
    max_tool_reply_chars: int = knob(2048, at_least(1))
    keep: Keep = Keep.both
    tool_timeout: float | None = knob(None, duration())
    """Seconds for every tool; null uses each tool's own."""
    concurrency: int = knob(256, at_least(1))
    """Episodes under way at once."""
    max_failures: float = knob(0.5, share())
    """Share of failed episodes above which the run stops: of a training step's, or of an evaluation's so far."""


LOCAL = ("sandbox.url", "None")


@dataclass
class SandboxConfig:
    """Where the code that a model writes is run."""

    level: SandboxLevel = knob(SandboxLevel.auto, only(*LOCAL))
    """Exactly this one, or the highest that can be proven."""
    min_level: SandboxLevel = SandboxLevel.L2
    """Below this no code is run."""
    stateless: bool = False
    """Forget variables and files after each call."""
    seconds: float = knob(10.0, duration())
    """Of one call; then it is interrupted."""
    memory_mb: int = knob(512, at_least(1, 2**30), only(*LOCAL))
    """Beyond what the preloaded packages take."""
    scratch_mb: int = knob(64, at_least(1, 2**30), only(*LOCAL))
    """Of the files of one session."""
    preload: list[str] = field(
        default_factory=lambda: ["numpy", "sympy", "pandas", "PIL.Image", "matplotlib.pyplot"], metadata=only(*LOCAL)
    )
    """Packages that every session has loaded."""
    warm: int = knob(8, at_least(0, 4096), only(*LOCAL))
    """Sessions made ahead of need."""
    url: str | None = knob(None, url())
    """A sandbox server's address instead of this machine, such as http://sandbox:8080."""
    token_env: str = knob("TURNWISE_SANDBOX_TOKEN", only("sandbox.url", "*"))
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
    workers: int = knob(0, at_least(0, 4096), only("scoring.run", "pool", "http"))
    """Processes of the pool, or requests under way; 0 takes the number of cores, and 32 requests."""
    timeout: float = knob(30.0, duration(), only("scoring.run", "pool", "http", "batch"))
    """Seconds for one trajectory (for a whole batch with `batch`)."""
    retries: int = knob(3, at_least(0), only("scoring.run", "pool", "http", "batch"))
    """How often a failure of the machinery is tried again."""
    url: str | None = knob(None, url(), only("scoring.run", "http"))
    """The reward server's address, such as http://127.0.0.1:8200."""
    token_env: str = knob("TURNWISE_REWARD_TOKEN", only("scoring.run", "http"))
    """The environment variable that holds the server's token."""
    batch_size: int = knob(64, at_least(1), only("scoring.run", "batch"))
    """Most trajectories given to a batch scorer in one call."""
    max_failures: float = knob(0.2, share())
    """Share of a step's trajectories whose scoring may fail; above it the run stops."""


@dataclass
class EvalConfig:
    """One evaluation."""

    samples: int | None = knob(128, at_least(1))
    """Samples evaluated, from the start; null takes all."""
    group_size: int = knob(1, at_least(1))
    """Episodes per sample."""
    dump_jsonl: str | None = None
    """Also write readable JSONL here."""


@dataclass
class SftConfig:
    """Supervised fine-tuning on recorded or scripted trajectories."""

    steps: int = knob(2000, at_least(1))
    batch_tokens: int = knob(8192, at_least(1))
    """Tokens packed into one batch."""
    lr: float = knob(2e-3, more_than(0))
    warmup: int = knob(50, at_least(0))
    weight_decay: float = knob(0.01, at_least(0))
    script: str | None = None
    """Who writes the traces to learn from: module:function giving a Script."""
    traces: int = knob(2000, at_least(1))
    """Scripted episodes, one per training sample."""
    recorded: list[str] = field(default_factory=list)
    """Recorded trajectories to learn from instead of a script: parquet files, patterns such as
    runs/NAME/trajectories/*.parquet, or runs, which stand for their training trajectories."""
    min_reward: float | None = knob(None, any_number(), only("sft.recorded", "*"))
    """Leave out recorded trajectories below this reward."""


@dataclass
class TrainingConfig:
    """The training loop: how much, how often, when to stop."""

    steps: int = knob(40, at_least(1))
    groups: int = knob(12, at_least(1))
    """Samples per step."""
    group_size: int = knob(8, at_least(1))
    """Episodes per sample; the others of its group are an episode's baseline."""
    epochs: int = knob(1, at_least(1))
    """Passes over a step's episodes."""
    minibatches: int = knob(1, at_least(1))
    """Weight updates per pass."""
    max_lag: int = knob(0, at_least(0))
    """Steps by which collection may run ahead of the weights; 0 is on-policy."""
    samples: int | None = knob(4096, at_least(1))
    """Samples to train on, from the start of the files or the generator; null takes all."""
    shuffle: bool = True
    """Shuffle them anew each epoch, from `seed`."""
    eval_every: int = knob(10, at_least(0))
    """Steps between evaluations; 0 evaluates before and after only."""
    save_every: int = knob(10, at_least(0))
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = knob(2, at_least(1))
    """Checkpoints kept."""
    target: float | None = knob(None, share())
    """Evaluation accuracy at which the run ends early."""
    max_minutes: float | None = knob(None, more_than(0))
    """Wall time after which the run ends cleanly."""
    max_tokens: int | None = knob(None, at_least(1))
    """Policy tokens after which the run ends cleanly."""
    drop_constant_groups: bool = False
    """Draw on until the step has enough groups whose rewards differ (dynamic sampling)."""
    max_draws: int = knob(3, at_least(1), only("training.drop_constant_groups", "True"))
    """At most this many times `groups` samples a step."""
    max_logprob_gap: float | None = knob(None, at_least(0))
    """Mean difference between the sampler's and the learner's log-probs accepted before the first update; 99 %
    of the tokens may differ by ten times as much. Null takes 0.001, and 0.02 where products are in bfloat16. Where both
    are proven to compute the same, any difference stops the run."""
    warn_logprob_gap: float = knob(0.05, at_least(0))
    """Mean difference between them above which a step warns; measured on the first minibatch of every step."""


@dataclass
class AlgorithmConfig:
    """From rewards to the gradient."""

    advantage: Advantage = Advantage.grpo
    credit: Credit = Credit.uniform
    turn_weight: float = knob(0.5, at_least(0), only("algorithm.credit", "turn"))
    """What a turn's own score is worth beside the reward."""
    turn_gamma: float = knob(0.0, share(), only("algorithm.credit", "turn"))
    """How much a turn answers for the scores of those after it: 0 for its own only, 1 for all."""
    loss: PolicyLoss = PolicyLoss.ppo_clip
    aggregation: Aggregation = Aggregation.token_mean
    aggregation_length: int = knob(1024, at_least(1), only("algorithm.aggregation", "sequence_sum_norm"))
    """The constant that sums are divided by."""
    clip_low: float = knob(0.2, at_least(0), only("algorithm.loss", "ppo_clip", "gspo", "cispo"))
    clip_high: float = knob(0.2, at_least(0), only("algorithm.loss", "ppo_clip", "gspo", "cispo"))
    clip_dual: float | None = knob(3.0, more_than(1), only("algorithm.loss", "ppo_clip"))
    """With a negative advantage the loss is at most this times it; null sets no bound."""
    gamma: float = knob(1.0, share(), only("algorithm.advantage", "gae", "reinforce_pp"))
    gae_lambda: float = knob(1.0, share(), only("algorithm.advantage", "gae"))
    entropy: float = knob(0.0, any_number())
    """Coefficient of the entropy bonus."""
    kl_loss: float = knob(0.0, at_least(0))
    """Coefficient of a KL loss against the reference policy; 0 needs no reference."""
    kl_loss_estimator: KLEstimator = knob(KLEstimator.k3, only("algorithm.kl_loss", "*"))
    kl_reward: float = knob(0.0, at_least(0))
    """Coefficient of a KL penalty in the reward."""
    kl_reward_estimator: KLEstimator = knob(KLEstimator.k1, only("algorithm.kl_reward", "*"))
    kl_control: KLControl = knob(KLControl.fixed, only("algorithm.kl_reward", "*"))
    kl_target: float = knob(0.1, more_than(0), only("algorithm.kl_control", "adaptive"))
    kl_horizon: int = knob(10000, at_least(1), only("algorithm.kl_control", "adaptive"))
    value_loss: float = knob(1.0, at_least(0), only("algorithm.advantage", "gae"))
    value_clip: float | None = knob(0.5, more_than(0), only("algorithm.advantage", "gae"))
    """How far a new value may lie from the old one before it is pulled back in the loss; null never."""
    old_logprobs: OldLogprobs = OldLogprobs.sampler
    correction: Correction = knob(Correction.none, only("algorithm.old_logprobs", "learner"))
    correction_mode: Excess = knob(Excess.truncate, only("algorithm.correction", "token", "sequence", "geometric"))
    correction_threshold: float = knob(2.0, at_least(1), only("algorithm.correction", "token", "sequence", "geometric"))
    overlong_tokens: int = knob(0, at_least(0))
    """Length of the zone before `rollout.max_tokens` in which the reward falls; 0 switches it off."""
    overlong_penalty: float = knob(1.0, at_least(0), only("algorithm.overlong_tokens", "*"))


@dataclass
class LearnerConfig:
    """How weights change."""

    lr: float = knob(1e-5, at_least(0))
    critic_lr: float = knob(1e-4, at_least(0), only("algorithm.advantage", "gae"))
    shared_critic: bool = knob(False, only("algorithm.advantage", "gae"))
    """Put the value head on the policy's own trunk instead of a copy."""
    weight_decay: float = knob(0.0, at_least(0))
    warmup: int = knob(0, at_least(0))
    """Updates of linear warm-up."""
    decay: Decay = Decay.constant
    grad_clip: float = knob(1.0, more_than(0))
    token_budget: int = knob(8192, at_least(1))
    """Tokens of one forward pass; a batch is worked off in as many as it needs."""
    gradient_checkpointing: bool = False
    device: str = "cpu"
    """Where gradients are computed: cpu or cuda. The sampler stays on the CPU."""
    precision: Precision | None = None
    """Of the learner's matrix products; null takes bfloat16 on a GPU and float32 elsewhere."""
    lora_rank: int = knob(0, at_least(0, 65536))
    """0 trains all weights."""
    lora_alpha: float = knob(32.0, more_than(0), only("learner.lora_rank", "*"))


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
    resume: Resume = knob(Resume.never, only("run", "*"))
    """For `turnwise train run=NAME`: go on with an existing run."""
    train: bool = True
    """`turnwise train train=false` only evaluates."""
    board: bool = False
    """Beside a run: serve the board in a process of its own, and say where."""
    board_port: int = knob(7007, at_least(0, 65535), only("board", "*"))
    """A free one is taken when another program has it."""
    seed: int = knob(0, at_least(0))
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
