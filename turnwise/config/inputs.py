"""Knobs of what goes in: the model, its chat template, the data, the engine and how a turn is sampled."""

from dataclasses import dataclass, field
from typing import Any

from turnwise.choices import EngineName, HistoryPolicy, ModelImplementation, Overlong, Precision, WeightTransfer
from turnwise.knobs import PLUGIN, also, at_least, choice_or_plugin, duration, knob, more_than, only, share, url

IN_PROCESS = ("auto", "torch", "cuda")
"""Engines that run the model in this process."""
SERVERS = ("vllm_server", "sglang_server")
"""Engines that are servers."""
FOREIGN = ("vllm", *SERVERS)
"""Engines that are not ours and run the model with their own kernels."""
TRAINABLE = (*IN_PROCESS, *FOREIGN)
"""Built-in engines that give log-probs and take weights."""
RENDERING = (*TRAINABLE, "scripted", PLUGIN)
"""Engines whose prompts we render and count ourselves; an endpoint does that on its side."""


@dataclass
class ModelConfig:
    """Which model."""

    path: str = knob("tiny", only("engine.name", *RENDERING))
    """A Hugging Face folder, a GGUF file, a hub id (OWNER/NAME or OWNER/NAME@REVISION), or a bundled model: `tiny`, or
    `tiny_vision`, which sees images. Set it first: to the model you want to evaluate or train, or to the folder that
    `turnwise sft` or `turnwise train` wrote."""
    implementation: ModelImplementation = knob(ModelImplementation.auto, only("engine.name", *IN_PROCESS))
    """Whose code computes the model; the plan says which and why. Set it to compare the two, or to `native` to be told
    what keeps a model from it."""
    trust_remote_code: bool = knob(False, only("engine.name", *RENDERING))
    """Run Python files that come with the model. Set it only for a model that transformers does not have and whose
    code you have read."""
    precision: Precision | None = knob(None, only("engine.name", *TRAINABLE))
    """The number format the sampler computes in; null takes bfloat16 on a GPU and float32 elsewhere. What is trained is
    float32 always. Take bfloat16 on a CPU when memory is short; log-probs then differ more from the learner's (see
    training.max_logprob_gap)."""


@dataclass
class ChatConfig:
    """How messages become tokens."""

    template: str | None = knob(None, only("engine.name", *RENDERING))
    """A built-in name (`chatml_hermes`) or a Jinja file; null uses the model's own. Set it when the model has none, or
    when `turnwise check` says that its template hides tools or rewrites earlier messages."""
    template_kwargs: dict[str, Any] = field(default_factory=dict, metadata=only("engine.name", *RENDERING))
    """Passed to the template, such as {enable_thinking: false}. Set what the model's card names."""
    tool_format: str | None = None
    """How the model writes tool calls; a file of turnwise/chat/formats. null takes the one that reads the calls of the
    chat template, and the plan says so; an endpoint's text is read as hermes. Set it when the template writes no calls
    and the plan names another than the model was trained with (see docs/formats.md)."""
    history: HistoryPolicy = knob(HistoryPolicy.auto, only("engine.name", *RENDERING))
    """What happens when the template would rewrite earlier messages, as with models whose template drops earlier
    reasoning (see docs/history.md). Take `verbatim` when second sequences cost too much, `refuse` to be sure that
    there are none."""
    max_pixels: int | None = knob(1_048_576, at_least(1))
    """Pixels of an image above which it is made smaller, in its own shape, before the model's processor or an endpoint
    gets it; null leaves sizes to them. Lower it when images take too many tokens, raise it for small print."""
    check_share: float = knob(0.0625, share(), only("engine.name", *RENDERING))
    """The share of finished episodes whose tokens are compared with one full render of their messages; those of the
    first round always are. Set it to 1 with a template that is new to you, when CPU time is no matter."""


@dataclass
class DataConfig:
    """Where samples come from."""

    train_files: list[str] = field(default_factory=list)
    """Files with verl-shaped rows to train on; empty uses the task's own generator. Parquet, json, jsonl, csv, tsv (or
    packed: csv.gz), globs of them, folders, those of `save_to_disk`, or hub datasets (hf://datasets/OWNER/NAME/FILE).
    Set it to train on your data."""
    eval_files: list[str] = field(default_factory=list)
    """Files to evaluate on, in the same shape; empty uses the task's own generator. Never name a training file here:
    the accuracy would be of samples the model has seen."""
    dataset: str | None = None
    """A Dataset class of your own that reads those files, as file.py:Class; it is made as verl makes its custom_cls.
    Set it when rows need code to be read. Null reads the files as they are."""
    images_from: str | None = knob(None, only("data.train_files", "*"), also("data.eval_files", "*"))
    """A folder or a .tar in which the images that rows name by path are looked for; a tar is read where it lies. Set it
    when they do not lie beside the data file; a row's own column `images_from` goes before it."""
    prompt_key: str = "prompt"
    """The column that holds the messages. Set it when your files call it something else."""
    default_source: str | None = None
    """The data source of rows in files that have no column data_source, such as TRL's: by it scorers are chosen and
    reports divided. Null refuses such rows."""
    max_prompt_tokens: int = knob(1024, at_least(1), only("engine.name", *RENDERING))
    """Longer first prompts, tools included, are handled by `data.overlong`. Raise it when `turnwise check` counts many
    left out and the model's context has room."""
    overlong: Overlong = knob(Overlong.filter, only("engine.name", *RENDERING))
    """What happens to prompts that are too long. Take `error` when no row of the data may be missing."""


@dataclass
class EngineConfig:
    """What runs the model."""

    name: str = knob(EngineName.auto.value, choice_or_plugin(EngineName))
    """Which sampler writes the completions, or module:Class or file.py:Class of your own; `engine=openai` is short for
    `engine.name=openai`. Take `torch` to leave a GPU alone, `vllm_server` to write with vLLM, `openai` to evaluate a
    model that is served elsewhere, `scripted` to try tools and scorers without a model, your own to write with another
    engine."""
    max_batch: int | None = knob(None, at_least(1), only("engine.name", *TRAINABLE))
    """Most sequences decoded together; null takes 64 on the CPU and 1024 on a GPU, and leaves it to vLLM and SGLang.
    Raise it for speed while memory lasts; `turnwise check` forecasts the cache."""
    memory_fraction: float = knob(0.9, more_than(0, 1), only("engine.name", "auto", "cuda", *FOREIGN))
    """The share of the GPU's memory that weights, learner and cache are planned within, and of vLLM or SGLang what it
    takes for itself; the plan shows who gets what. What PyTorch reserves and does not use, graphs and the context of
    CUDA come on top: 6 to 10 hundredths of the GPU were measured (0.9 held 98 of 100), and `gpu/memory_gib` counts
    them. Lower it when other programs, or the learner beside vLLM, need the GPU too."""
    sleep: bool | None = knob(None, only("engine.name", *TRAINABLE))
    """Whether the sampler gives its cache back while the learner updates; null does so on a GPU where both do not fit
    side by side. Set it to true to leave the learner all the memory there is; episodes that run ahead
    (training.max_lag) need it false."""
    threads: int = knob(0, at_least(0, 1024), only("engine.name", "auto", "torch", PLUGIN))
    """CPU threads; 0 measures and takes the fastest count that gives reproducible sums. Set it on a shared machine, or
    to get the same tokens on machines that would measure differently."""
    batch_invariant: bool | None = knob(None, only("engine.name", *IN_PROCESS))
    """Whether a conversation's tokens must not depend on what else is computed; null says yes on the CPU and no on a
    GPU. On the CPU products are padded to shapes that are proven to round alike; take false for speed with large models
    (about twice as fast with few sequences; the native decoder then keeps its weights twice, once laid out for
    products). On a GPU take true to have sampler and learner share kernels that round alike whatever the batch: slower,
    and their log-probs are equal to the last bit. Without it they agree to rounding."""
    base_url: str | None = knob(None, url(), only("engine.name", "openai"))
    """An OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1. The key, where it needs one, is the value of the
    environment variable OPENAI_API_KEY. Must be set with engine=openai."""
    model: str | None = knob(None, only("engine.name", "openai", "vllm_server"))
    """The model's name at the endpoint or at attached servers; null asks, and exactly one must be served. Set it when
    there are several."""
    timeout_seconds: float = knob(120.0, duration(), only("engine.name", "openai"))
    """Seconds for one request to the endpoint. Raise it for long answers or a busy server."""
    servers: list[str] = field(default_factory=list, metadata=only("engine.name", *SERVERS))
    """Addresses of servers to attach to, such as [http://node1:8000, http://node2:8000]; empty starts them here. Set it
    when they run on other machines or outlive a run (docs/engines.md says how to start them)."""
    replicas: int = knob(1, at_least(1, 4096), only("engine.name", *SERVERS))
    """How many servers are started here. Raise it to the number of GPUs that are left beside the learner's."""
    server_options: list[str] = field(default_factory=list, metadata=only("engine.name", *FOREIGN))
    """Further options of the engine's own command line, as [--max-model-len, "4096"]; they come last and so win. Set it
    for what Turnwise has no knob for, such as --tensor-parallel-size."""
    transfer: WeightTransfer = knob(WeightTransfer.files, only("engine.name", "vllm_server"))
    """How all weights get into a server. Take `nccl` where learner and servers have GPUs of their own and files take
    too long; it keeps a second copy of the weights on the learner's GPU."""
    python: str | None = knob(None, only("engine.name", *SERVERS))
    """The interpreter that has vLLM or SGLang, such as ~/vllm/bin/python; null takes the one that runs Turnwise. Set
    it to keep their packages in an environment of their own."""
    retries: int = knob(3, at_least(0), only("engine.name", "openai", *FOREIGN, PLUGIN), also("cluster.name", "ray"))
    """How often a request that failed is sent again, or a turn whose server or node went away is asked for again.
    Lower it to see failures at once, raise it for a shaky network."""
    script: list[str] = field(default_factory=list, metadata=only("engine.name", "scripted"))
    """What the scripted sampler says, turn by turn; the last line repeats. Must be set with engine=scripted."""


@dataclass
class SamplingConfig:
    """How one assistant turn is drawn."""

    temperature: float = knob(1.0, at_least(0, 100))
    """How evenly tokens are drawn; 0 always takes the likeliest. Use 0 for an evaluation that repeats exactly; leave 1
    for training, where the log-probs must be those of the policy itself."""
    top_p: float = knob(1.0, more_than(0, 1))
    """Draw from the likeliest tokens that hold this share of the probability. Lower it for evaluation only: what is cut
    off cannot be learned from."""
    top_k: int = knob(0, at_least(0), only("engine.name", *RENDERING))
    """Draw from this many of the likeliest tokens; 0 considers every token. Set it for evaluation only, as for
    top_p."""
    max_tokens: int = knob(128, at_least(1))
    """Most tokens of one assistant turn. Raise it when turns end by length, as they do with models that reason."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a turn, kept in the text. Set it when the model does not end its turns itself."""
