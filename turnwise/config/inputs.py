"""Knobs of what goes in: the model, its chat template, the data, the engine and how a turn is sampled."""

from dataclasses import dataclass
from typing import Any

from turnwise.config.choices import HistoryPolicy, ModelImplementation, Overlong, Precision
from turnwise.config.knobs import (
    also,
    at_least,
    duration,
    engine_or_plugin,
    harmless,
    is_plugin,
    knob,
    more_than,
    only,
    only_engines,
    path,
    reaches,
    share,
    url,
)


@dataclass
class ModelConfig:
    """Which model is used, and how it is loaded."""

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
    """The data source of rows in files that have no column data_source, such as TRL's; scorers are chosen and
    reports are divided by it. Null refuses such rows."""
    max_prompt_tokens: int = knob(1024, at_least(1), only_engines("renders"))
    """Longer first prompts, tools included, are handled by `data.overlong`. Raise it when `turnwise check` counts many
    left out and the model's context has room."""
    overlong: Overlong = knob(Overlong.filter, only_engines("renders"))
    """What happens to prompts that are too long. Take `error` when no row of the data may be missing."""


@dataclass
class EngineConfig:
    """Which engine runs the model, and how much memory it takes."""

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
    base_url: str | None = knob(None, url(), only_engines(), reaches("network"))
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
