"""Knobs of the model: which one it is, and how its messages become tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.config.choices import (
    HistoryPolicy,
    ModelImplementation,
    Precision,
)
from turnwise.config.knobs import (
    at_least,
    harmless,
    is_plugin,
    knob,
    only_engines,
    path,
    reaches,
    share,
)
from turnwise.config.marks import changes_work, key_in


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
