"""Every knob of the core, once, as dataclasses. `compose.py` fills them, `turnwise config` documents them."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from turnwise.config.choices import (
    HistoryPolicy,
    Keep,
    ModelImplementation,
    Overlong,
    Precision,
    Resume,
    ScoringRun,
)
from turnwise.config.knobs import (
    also,
    any_number,
    at_least,
    duration,
    engine_or_plugin,
    harmless,
    is_plugin,
    knob,
    leads_away,
    more_than,
    name_of,
    only,
    only_engines,
    path,
    reaches,
    share,
    url,
    was,
)
from turnwise.config.marks import changes_work, key_in, may_change
from turnwise.config.training import AlgorithmConfig, LearnerConfig, SftConfig, TrackingConfig, TrainingConfig

__all__ = [
    "AlgorithmConfig", "ChatConfig", "Config", "DataConfig", "EngineConfig", "EvalConfig", "LearnerConfig",
    "ModelConfig", "RolloutConfig", "SamplingConfig", "ScoringConfig", "SftConfig", "TrackingConfig", "TrainingConfig",
]  # fmt: skip

ONE_MACHINE = "none"
"""`cluster` where everything runs on this machine."""


@dataclass
class ModelConfig:
    """Which model is used, and how it is loaded."""

    EVERY_KNOB: ClassVar = (
        changes_work(),
        key_in("HF_TOKEN"),
    )

    path: str = knob("tiny", only_engines("renders"), path(), reaches("network", None))
    """A Hugging Face folder, a GGUF file, a hub id (OWNER/NAME or OWNER/NAME@REVISION), or a bundled model: `tiny`, or
    `tiny_vision`, which reads images. Set it first: to the model you want to evaluate or train, or to the folder that
    `turnwise sft` or `turnwise train` wrote."""
    implementation: ModelImplementation = knob(ModelImplementation.auto, only_engines("here"))
    """Which code runs the model; the plan says which one and why. Set it to compare the two, or to `native` to see
    why a model cannot run natively."""
    trust_remote_code: bool = knob(False, only_engines("renders"), reaches("code", None))
    """Run Python files that come with the model. Set it only for a model that transformers does not have and whose
    code you have read."""
    precision: Precision | None = knob(None, only_engines())
    """The number format the sampler computes in; null takes bfloat16 on a GPU and float32 elsewhere. What is trained is
    float32 always. Take bfloat16 on a CPU when memory is short; log-probs then differ more from the learner's (see
    training.max_logprob_gap)."""


@dataclass
class ChatConfig:
    """How messages become tokens: template, tool format and history."""

    EVERY_KNOB: ClassVar = (changes_work(),)

    template: str | None = knob(None, only_engines("renders"), path(), harmless())
    """A built-in name (`chatml_hermes`) or a Jinja file; null uses the model's own. Set it when the model has none, or
    when `turnwise check` says that its template hides tools or rewrites earlier messages."""
    template_kwargs: dict[str, Any] = knob({}, only_engines("renders"), harmless())
    """Passed to the template, such as {enable_thinking: false}. Set what the model's card names."""
    tool_format: str | None = knob(None, path(), reaches("code", is_plugin))
    """How the model writes tool calls: a file of turnwise/chat/formats, or a function of your own as mine.py:fmt. null
    takes the one that reads the calls of the chat template, and the plan says so; an endpoint's text is read as hermes.
    Set it when the template writes no calls and the plan names another than the model was trained with (see
    docs/formats.md)."""
    history: HistoryPolicy = knob(HistoryPolicy.auto, only_engines("renders"))
    """What happens when the template would rewrite earlier messages, as with models whose template drops earlier
    reasoning (see docs/history.md). Take `verbatim` when second sequences cost too much, `refuse` to be sure that
    there are none."""
    max_pixels: int | None = knob(1_048_576, at_least(1))
    """Images with more pixels are scaled down, keeping their shape, before the model's processor or an endpoint
    gets them; null changes no size. Lower it when images take too many tokens, raise it for small print."""
    check_share: float = knob(0.0625, share(), only_engines("renders"))
    """The share of finished episodes whose tokens are compared with one full render of their messages; those of the
    first round always are. Set it to 1 with a template that is new to you, when CPU time is no matter."""


@dataclass
class DataConfig:
    """Which files samples come from, and how they are read."""

    EVERY_KNOB: ClassVar = (
        changes_work(),
        key_in("HF_TOKEN"),
    )

    train_files: list[str] = knob([], path(), reaches("network", None))
    """Rows to train on (docs/tasks.md); empty uses the task's own generator. Parquet, json, jsonl, csv, tsv (or
    packed: csv.gz), globs of them, folders, those of `save_to_disk`, or hub datasets (hf://datasets/OWNER/NAME/FILE).
    Set it to train on your data."""
    eval_files: list[str] = knob([], path(), reaches("network", None))
    """Files to evaluate on, in the same shape; empty uses the task's own generator. Never name a training file here:
    the accuracy would be of samples the model has seen."""
    dataset: str | None = knob(None, path(), reaches("code"))
    """A function of your own that reads those files, as file.py:rows; `def rows(files)` gives dicts of columns. Set it
    when rows need code to be read. Null reads the files as they are."""
    images_from: str | None = knob(
        None, only("data.train_files", "*"), also("data.eval_files", "*"), reaches("files", None)
    )
    """A folder or a .tar in which the images that rows name by path are looked for; a tar is read where it lies. Set it
    when they do not lie beside the data file; a row's own column `images_from` takes precedence."""
    prompt_key: str = knob("prompt", harmless())
    """The column that holds the messages. Set it when your files call it something else."""
    default_source: str | None = knob(None, harmless())
    """The data source of rows in files that have no column data_source; scorers are chosen and
    reports are divided by it. Null refuses such rows."""
    max_prompt_tokens: int = knob(1024, at_least(1), only_engines("renders"))
    """Longer first prompts, tools included, are handled by `data.overlong`. Raise it when `turnwise check` counts many
    left out and the model's context has room."""
    overlong: Overlong = knob(Overlong.filter, only_engines("renders"))
    """What happens to prompts that are too long. Take `error` when no row of the data may be missing."""


@dataclass
class EngineConfig:
    """Which engine runs the model, and how much memory it takes."""

    EVERY_KNOB: ClassVar = (
        may_change(),
        changes_work(),
    )

    name: str = knob("auto", engine_or_plugin(), path())
    """Which sampler writes the completions, or module:Class or file.py:Class of your own; `engine=openai` is short for
    `engine.name=openai`. Take `torch` to leave a GPU alone, `vllm_server` to write with vLLM, `openai` to evaluate a
    model that is served elsewhere, `scripted` to try tools and scorers without a model, your own to write with another
    engine."""
    max_batch: int | None = knob(None, at_least(1), only_engines())
    """Most sequences decoded together; null takes 64 on the CPU and 1024 on a GPU, and leaves it to vLLM and SGLang.
    Raise it for speed while memory lasts; `turnwise check` forecasts the cache."""
    memory_fraction: float = knob(0.9, more_than(0, 1), only_engines())
    """The share of the GPU's memory that weights, learner and cache may use; for vLLM or SGLang the share that it
    takes for itself; the plan shows each part. What PyTorch reserves and does not use, graphs and the context of
    CUDA come on top: 6 to 10 % of the GPU were measured (with 0.9, 98 % were held), and `gpu/memory_gib` counts
    them. Lower it when other programs, or the learner beside vLLM, need the GPU too."""
    sleep: bool | None = knob(None, only_engines())
    """Whether the sampler frees its cache while the learner updates; null does so on a GPU where both do not fit
    side by side. Set it to true to leave the learner all the memory there is; episodes that run ahead
    (training.max_lag) need it false."""
    threads: int = knob(0, at_least(0, 1024), only_engines())
    """CPU threads; 0 measures and takes the fastest count that gives reproducible sums. Set it on a shared machine, or
    to get the same tokens on machines that would measure differently."""
    batch_invariant: bool | None = knob(None, only_engines())
    """Whether a conversation's tokens must be independent of the rest of the batch; null is true on the CPU, false on a
    GPU. On the CPU products are padded to shapes that are proven to round alike; take false for speed with large models
    (about twice as fast with few sequences; the native decoder then keeps its weights twice, once laid out for
    products). On a GPU take true to have sampler and learner share kernels that round alike whatever the batch: slower,
    and their log-probs are equal to the last bit. Without it they agree to rounding."""
    base_url: str | None = knob(None, url(), only_engines(), reaches("network"), key_in("OPENAI_API_KEY"))
    """An OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1. The key, where it needs one, is the value of the
    environment variable OPENAI_API_KEY. Must be set with engine=openai."""
    model: str | None = knob(None, only_engines(), harmless())
    """The model's name at the endpoint or at attached servers; null asks, and exactly one must be served. Set it when
    there are several."""
    timeout_seconds: float = knob(120.0, duration(), only_engines())
    """Seconds for one request to the endpoint. Raise it for long answers or a busy server."""
    retries: int = knob(3, at_least(0), only_engines(), also("cluster", "ray"))
    """How often a request that failed is sent again, or a turn whose server or node went away is asked for again.
    Lower it to see failures at once, raise it for a shaky network."""
    script: list[str] = knob([], only_engines(), harmless())
    """What the scripted sampler says, turn by turn; the last line repeats. Must be set with engine=scripted."""


@dataclass
class SamplingConfig:
    """How one assistant turn is drawn."""

    EVERY_KNOB: ClassVar = (changes_work(),)

    temperature: float = knob(1.0, at_least(0, 100))
    """The sampling temperature; 0 takes the likeliest token. Use 0 for an evaluation that repeats exactly; leave 1
    for training, where the log-probs must be those of the policy itself."""
    top_p: float = knob(1.0, more_than(0, 1))
    """Draw from the likeliest tokens that hold this share of the probability. Lower it for evaluation only: what is cut
    off cannot be learned from."""
    top_k: int = knob(0, at_least(0), only_engines("renders"))
    """Draw from this many of the likeliest tokens; 0 considers every token. Set it for evaluation only, as for
    top_p."""
    max_tokens: int = knob(128, at_least(1))
    """Most tokens of one assistant turn. Raise it when turns end by length, as they do with models that reason."""
    stop: list[str] = knob([], harmless())
    """Strings that end a turn, kept in the text. Set it when the model does not end its turns itself."""


@dataclass
class RolloutConfig:
    """How an episode runs and what ends it. Null budgets are unlimited."""

    EVERY_KNOB: ClassVar = (changes_work(),)

    agent: str | None = knob(None, path(), reaches("code", leads_away))
    """Loop for rows that name none: a built-in one, an extension's or module:function; null infers it.
    Built in are single_turn, tool_calling, checker, task_functions, http_env, gym_env and until_finish; tools or an
    interaction let null be tool_calling. Set it to your own `file.py:loop`, or single_turn to leave tools unused."""
    agent_options: dict[str, Any] = knob(
        {},
        only("rollout.agent", "*"),
        reaches("network", None),
        key_in("TURNWISE_ENV_TOKEN", "token_env"),
    )
    """Options of that loop, such as {rounds: 2, trained: true} of the checker or {url: http://127.0.0.1:18950} of
    http_env; of your own, its keyword arguments. Set those of the loop in use; others are refused."""
    scripted_answer: str = knob("#### 0", harmless())
    """The answer used instead of the model's when a run is checked before its start. Set it where an agent or a scorer
    accepts only answers in a special form, such as '{"answer": 0}'."""
    tools: list[str] = knob([], path(), reaches("code", leads_away))
    """Tools the policy may call: built-in names, module:function, file.py:Class, or a YAML file with a list `tools`
    (docs/tools.md). Set it to offer your own."""
    tool_options: dict[str, Any] = knob({}, harmless())
    """Options by tool, such as {search: {timeout: 20, rate_limit: 5}} or {python: {frame: "<out>{output}</out>"}}
    (docs/tools.md). Set them for a tool that is slow or limited, or whose replies are long or need a frame."""
    interaction: str | None = knob(None, path(), reaches("code", leads_away))
    """A simulated user for rows that name none: a built-in name, an extension's, module:function or module:Class. Set
    it when answers should get a reply; with null the first answer without a tool call ends the episode."""
    interaction_kwargs: dict[str, Any] = knob(
        {},
        only("rollout.interaction", "*"),
        reaches("network", None),
        key_in(option="api_key_env"),
    )
    """Config of that interaction, such as {max_turns: 2}. Set what the class reads."""
    max_assistant_turns: int | None = knob(16, at_least(1))
    """Turns of the policy after which the episode ends. Raise it for tasks that need many tool calls."""
    max_user_turns: int | None = knob(None, at_least(0))
    """Messages of the simulated user after which the episode ends; tool replies do not count. Set it when the user
    would never stop."""
    max_parallel_calls: int = knob(8, at_least(1))
    """Tool calls of one turn that are run; each further one is answered with an error. Lower it when the policy floods
    an expensive tool."""
    max_malformed_calls: int = knob(3, at_least(1))
    """Turns in a row whose calls cannot be parsed, after which the episode ends. Raise it for a model that still learns
    the format."""
    max_tokens: int | None = knob(None, at_least(1))
    """Tokens after the first prompt, after which the episode ends: the policy's, the tools' and the user's together.
    Set it so that an episode fits the model's context."""
    max_images: int | None = knob(16, at_least(1))
    """Images shown to the model in one episode, those of the prompt included, after which it ends; a prompt with more
    is refused. Raise it when the model's context and memory have room for their tokens; null has no limit."""
    max_seconds: float | None = knob(600.0, duration())
    """Seconds of one episode, tools included; waiting for a slot or for new weights is not counted. Raise it for slow
    tools."""
    max_reply_tokens: int = knob(1024, at_least(1))
    """Tokens of a tool's reply; longer ones are cut as `rollout.keep` says. The tokenizer of an endpoint is not known:
    there a token counts as 4 characters. Raise it for tools that return pages, while the context has room."""
    keep: Keep = Keep.both
    """Which part of an over-long tool reply is kept. Take `tail` when the end matters, as with a traceback."""
    tool_timeout: float | None = knob(None, duration())
    """Seconds for one call of any tool; null uses each tool's own. Set it to bound tools that declare none."""
    concurrency: int | None = knob(None, at_least(1))
    """Episodes under way at once; null takes 256, and twice engine.max_batch on a GPU, so that it has work while tools
    run. With vLLM and SGLang it is twice what their servers decode together: engine.max_batch or their own option, else
    1,024 a server on a GPU of 70 GiB or more and 256 on a smaller one. Lower it when tools, users or an endpoint cannot
    serve as many."""
    max_failures: float = knob(0.5, share())
    """Share of failed episodes above which the run stops: of a training step's, or of an evaluation's so far. Lower it
    when no failure is normal, raise it when a service is known to be shaky."""


@dataclass
class ScoringConfig:
    """How trajectories are scored: which scorers, with which options, and how they are run."""

    EVERY_KNOB: ClassVar = (changes_work(),)

    scorers: dict[str, str] = knob({}, path(), reaches("code", None))
    """Scorer by data source: a built-in name or module:function; the key "default" serves all others. Set it to reward
    with your own function."""
    options: dict[str, Any] = knob({}, reaches("network", None), key_in(option="api_key_env"))
    """Options by scorer, such as {gsm8k: {wrong: -0.1}}. Set those of the scorer in use; others are refused."""
    weights: dict[str, float] = knob({}, harmless())
    """Weight by part: the reward is then the weighted sum of the parts; those not named count fully. Set it when a
    scorer returns several parts that should count differently."""
    run: ScoringRun = ScoringRun.inline
    """How scorers are run; the scores are the same. Take `pool` for slow or unreliable ones, `http` for a server."""
    workers: int = knob(0, at_least(0, 4096), only("scoring.run", "pool", "http"))
    """Processes of the pool, or requests under way; 0 takes the number of cores, and 32 requests. Raise it when scoring
    is what a step waits for."""
    timeout: float = knob(30.0, duration())
    """Seconds for one trajectory (for a whole batch with `batch`). Raise it for slow judges and test suites. With
    `inline` it is twenty times as long, since waiting for a sandbox or a judge counts; blocking code is not stopped."""
    retries: int = knob(3, at_least(0), only("scoring.run", "pool", "http", "batch"))
    """How often scoring that failed for lack of an answer is tried again. Lower it to see failures at once."""
    agent_error: float | None = knob(0.0, any_number())
    """Reward of an episode whose agent raised because of what the policy wrote, such as a tool that is not there; its
    parts are 0. Lower it to punish that; null keeps the score (docs/ext/sdk_agents.md)."""
    url: str | None = knob(
        None, url(), only("scoring.run", "http"), reaches("network"), key_in("TURNWISE_REWARD_TOKEN")
    )
    """The reward server's address, such as http://127.0.0.1:8200. Its token is the value of the environment variable
    TURNWISE_REWARD_TOKEN. Must be set with scoring.run=http."""
    batch_size: int = knob(64, at_least(1), only("scoring.run", "batch"))
    """Most trajectories given to a batch scorer in one call. Set it to what your function can take at once."""
    max_failures: float = knob(0.2, share())
    """Share of a step's trajectories whose scoring may fail; above it the run stops. Raise it for a judge that is often
    unreachable: such trajectories get no reward and are not trained on."""


@dataclass
class EvalConfig:
    """How an evaluation is run: how many samples and episodes, and what is written."""

    EVERY_KNOB: ClassVar = (may_change(),)

    samples: int | None = knob(128, at_least(1))
    """Samples evaluated, from the start; null takes all. Raise it for smaller error bars (four times as
    many halve them)."""
    group_size: int = knob(1, at_least(1))
    """Episodes per sample. Raise it to measure pass@k, or to average out the sampling."""
    dump_jsonl: str | None = knob(None, harmless())
    """Also write the episodes as readable JSONL to this file. Set it to read them with other tools."""


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
