"""The renderer of a configured model, its tool-call format, and who computes the model: no weight is read for any."""

import json
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from turnwise import extensions
from turnwise.chat.calls.format_words import FormatChoice
from turnwise.chat.calls.tool_format import load_format
from turnwise.config import Config
from turnwise.engines.devices import choose as choose_devices
from turnwise.engines.opener import model_source
from turnwise.errors import TemplateError

_tried: "WeakKeyDictionary[Tokenizer, dict[tuple[str | None, ...], FormatChoice]]" = WeakKeyDictionary()
"""The formats of tokenizers in use: inside another trainer every episode asks."""

if TYPE_CHECKING:
    from turnwise.chat.images.processor import ImageProcessor
    from turnwise.chat.renderer import Renderer
    from turnwise.chat.tokenizer import Tokenizer
    from turnwise.engines.model.loading import ImplementationChoice, ModelFacts


def choose_model(config: Config) -> "tuple[ImplementationChoice, ModelFacts] | None":
    """Who computes the configured model and what is known of it; None where no model runs here. No weight is read."""
    if not extensions.engine(config.engine.name).here:
        return None
    choose_devices(config)  # a GPU that is not there is refused before anything is written
    from turnwise.engines.model.loading import choose_implementation, model_facts

    source = model_source(config)
    choice = choose_implementation(source, config.model.implementation)
    return choice, model_facts(source, choice)


def make_renderer(config: Config) -> "Renderer":
    """The renderer of the configured model."""
    from turnwise.chat.images.processor import NotShown, find_image_processor
    from turnwise.engines.model.loading import read_tokenizer

    if config.chat.tool_format is not None:
        load_format(config.chat.tool_format)  # a name that is not known is told before anything is read
    choose_model(config)  # first: transformers looks into config.json too, and takes a broken one at its word
    source = model_source(config)
    tokenizer = read_tokenizer(source, config.chat.template)
    images = text_only = None
    if source.gguf_file is None:
        try:
            images = find_image_processor(source.folder, tokenizer, config.chat.max_pixels)
        except NotShown as why:
            text_only = str(why)
    return renderer_of(config, tokenizer, images, text_only)


def renderer_of(
    config: Config, tokenizer: "Tokenizer", images: "ImageProcessor | None" = None, text_only: str | None = None
) -> "Renderer":
    """The renderer of a tokenizer, wherever that is from; `images` for a model that sees, `text_only` for one that
    has an image processor and does not."""
    from turnwise.chat.renderer import Renderer

    call_format = load_format(format_of(config, tokenizer).name)
    return Renderer(
        tokenizer,
        call_format,
        history=config.chat.history,
        template_kwargs=config.chat.template_kwargs,
        images=images,
        text_only=text_only,
    )


def format_of(config: Config, tokenizer: "Tokenizer") -> FormatChoice:
    """The tool-call format, and why."""
    from turnwise.chat.calls.detect_format import find_format

    named, kwargs = config.chat.tool_format, config.chat.template_kwargs
    tried = _tried.setdefault(tokenizer, {})
    key = named, json.dumps(kwargs, sort_keys=True, default=repr), *tokenizer.templates.values()
    choice = tried.get(key) or find_format(named, tokenizer, kwargs)
    tried[key] = choice
    return choice


def demand_readable_calls(config: Config, tokenizer: "Tokenizer") -> None:
    """A model whose calls no format reads can be given no tools: it would learn without them."""
    problem = format_of(config, tokenizer).problem
    if problem is not None:
        raise TemplateError(problem)
