"""Every knob, once: the config tree as dataclasses. `turnwise.compose` fills it, `turnwise check` shows it."""

import enum
from dataclasses import dataclass, field
from typing import Any


def only(key: str, *values: str) -> dict[str, Any]:
    """Metadata: this knob is read only when another has one of these values ("*" means: when it is set)."""
    return {"only": (key, values)}


RENDERING = ("torch", "scripted")
"""Engines whose prompts we render and count ourselves; an endpoint does that on its side."""


class Overlong(enum.Enum):
    """What happens to prompts longer than `data.max_prompt_tokens`."""

    filter = "filter"
    error = "error"


class HistoryPolicy(enum.Enum):
    """What happens when the chat template would rewrite earlier messages; see chat/renderer.py."""

    refuse = "refuse"
    verbatim = "verbatim"
    segment = "segment"


class ExcessCalls(enum.Enum):
    """What happens to tool calls beyond `rollout.max_parallel_calls`."""

    refuse = "refuse"
    stop = "stop"


class Keep(enum.Enum):
    """Which part of an over-long tool reply is kept."""

    head = "head"
    tail = "tail"
    both = "both"


class Precision(enum.Enum):
    """Number format of weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class EngineName(enum.Enum):
    """Which sampler writes the completions."""

    torch = "torch"
    openai = "openai"
    scripted = "scripted"


@dataclass
class ModelConfig:
    """Which model."""

    path: str = field(default="tiny", metadata=only("engine.name", *RENDERING))
    """A Hugging Face folder or hub id, or `tiny` for the embedded model."""
    precision: Precision = field(default=Precision.float32, metadata=only("engine.name", "torch"))


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


@dataclass
class ScoringConfig:
    """What a trajectory is worth."""

    scorers: dict[str, str] = field(default_factory=dict)
    """Scorer by data source: a built-in name or module:function. The key "default" serves all others."""


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
class Config:
    """The whole tree."""

    task: str | None = "arithmetic"
    """A file of turnwise/tasks or a module; it brings data, tools, interaction and scorers. Null for none."""
    run: str | None = None
    """Name of the run directory; null makes one from the command and the time."""
    runs_dir: str = "runs"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
