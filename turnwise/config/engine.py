"""Knobs of what writes: the engine, and how one assistant turn is drawn."""

from dataclasses import dataclass
from typing import ClassVar

from turnwise.config.knobs import (
    also,
    at_least,
    duration,
    engine_or_plugin,
    harmless,
    knob,
    more_than,
    only_engines,
    path,
    reaches,
    url,
)
from turnwise.config.marks import changes_work, key_in, may_change


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
    takes for itself; the plan shows each part. PyTorch is held to it, with 0.75 to 2 GiB left for CUDA itself:
    beyond it unused blocks are given back, then a pass is split. `gpu/memory_gib` shows what was held. A learner beside
    vLLM takes what is free. Lower it when other programs, or that learner, need the GPU too."""
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
