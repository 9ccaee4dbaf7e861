"""Opens a sampler of the user's own: of it nothing is known but what it says of itself."""

import inspect
import os
from collections.abc import Callable
from typing import Any

from turnwise.chat.renderer import Renderer
from turnwise.config import Config
from turnwise.engines.model.sources import ModelSource
from turnwise.engines.opened import OpenSampler, Say, model_source
from turnwise.engines.samplers.checked import CheckedSampler
from turnwise.engines.samplers.sampler import Capabilities, Sampler
from turnwise.errors import PluginError
from turnwise.plugins import call, load


def find_own(spec: str) -> Callable[..., Any]:
    """The class or function of the user's that makes a sampler; PluginError when it cannot be called as one."""
    found = load(spec, "engine")
    if not callable(found):
        raise PluginError(f"engine {spec!r} must be a class or a function, not {type(found).__name__}")
    try:
        inspect.signature(found).bind(None, None, None)
    except TypeError as error:
        raise PluginError(f"engine {spec!r} is called with (config, source, tokenizer): {error}") from error
    return found  # type: ignore[no-any-return]


def open_own(config: Config, renderer: Renderer, say: Say) -> OpenSampler:
    """A sampler of the user's: of it nothing is known but what it says of itself."""
    spec = config.engine.name
    source = model_source(config)
    made = call(find_own(spec), spec, "engine", config, source, renderer.tokenizer)
    methods = [name for name in vars(Sampler) if inspect.iscoroutinefunction(getattr(Sampler, name))]
    lacking = [name for name in methods if not inspect.iscoroutinefunction(getattr(made, name, None))]
    if lacking:
        raise PluginError(f"engine {spec!r} is no Sampler: it lacks `async def {lacking[0]}` (docs/engines.md)")
    length, capabilities = getattr(made, "context_length", None), getattr(made, "capabilities", None)
    if not isinstance(length, int) or length < 1 or not isinstance(capabilities, Capabilities):
        raise PluginError(f"engine {spec!r} is no Sampler: it must set context_length and capabilities")
    say(f"engine {spec}: {capabilities}; that its tokens do not depend on batching is not proven")
    checked = CheckedSampler(made, spec, vocabulary_of(source, renderer.tokenizer.vocab_size))
    return OpenSampler(checked, config.engine.threads or os.cpu_count() or 1)


def vocabulary_of(source: ModelSource, words: int) -> int:
    """How many token ids a model has: as its config says, which may be more than its tokenizer has words for."""
    from turnwise.engines.model.checkpoint_format import read_raw_config

    raw = {} if source.gguf_file is not None else read_raw_config(source.folder)
    text = raw.get("text_config")
    size = raw.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return max(size, words) if isinstance(size, int) else words
