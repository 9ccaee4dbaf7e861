"""From a Config to what episodes run in: samples, tools, users, plan and scorers, and last of all the engine."""

import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise import extensions
from turnwise.chat.calls.tool_format import load_format
from turnwise.chat.images.blocks import images_in
from turnwise.config import Config, SamplingConfig
from turnwise.config.check import check_config
from turnwise.data.task import known_scorers, load_task, rows_of
from turnwise.engines.opener import opener_of
from turnwise.engines.rendering import choose_model, demand_readable_calls, format_of, make_renderer
from turnwise.engines.samplers.request import NoiseKey
from turnwise.engines.samplers.sampler import Sampler
from turnwise.errors import ConfigError, DataError, EngineError, PluginError, TemplateError
from turnwise.ledger import Media
from turnwise.rollout.chat_backends import LOST_RETRY, TokenBackend
from turnwise.rollout.conversation import Conversation
from turnwise.rollout.episode import MakeBackend, RolloutContext
from turnwise.rollout.placement import placement_of
from turnwise.rollout.routing import Plan, Route
from turnwise.rollout.toolbox.files import load_tools
from turnwise.rollout.toolbox.loading import as_tool
from turnwise.rollout.toolbox.replies import CHARACTERS_PER_TOKEN
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.tool import Tool
from turnwise.rollout.users.loading import Users
from turnwise.rollout.users.user import UserLike
from turnwise.scoring.scorer import Scorer, as_scorer
from turnwise.scoring.service import Scoring
from turnwise.system.image_sources import open_source
from turnwise.system.plugins import adapted, call
from turnwise.types import Image, JsonSchema, Sample

if TYPE_CHECKING:
    from turnwise.chat.renderer import Renderer
    from turnwise.chat.template.history_forecast import TemplateForecast
    from turnwise.engines.model.loading import ImplementationChoice
    from turnwise.engines.samplers.scripted import Script
    from turnwise.rollout.endpoint_backend import Endpoint


UNCOUNTED = (
    f"the endpoint's tokenizer is not known: {CHARACTERS_PER_TOKEN} characters count as a token where tools' replies "
    "are cut (rollout.max_reply_tokens)"
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything but the model: whatever is wrong with names, rows, tools or templates has come out by now."""

    config: Config
    samples: list[Sample]
    dropped: int
    """Samples left out because their prompt is too long."""
    implementation: "ImplementationChoice | None"
    """Who computes the model and why; None where none runs here."""
    renderer: "Renderer | None"
    """None for endpoints, which render for themselves."""
    toolbox: Toolbox
    users: Users
    plan: Plan
    scoring: Scoring
    split: str = ""
    """Which samples these are: train or test."""
    of_caller: tuple[str, ...] = ()
    """What came as Python objects in place of what the config names: samples, tools, scorer, interaction."""

    @asynccontextmanager
    async def running(self, say: Callable[[str], None], *, episodes: bool = True) -> AsyncIterator[None]:
        """What tools, clients and scorers need is started, and stopped on every path; without `episodes`, which other
        processes play, what scorers need alone."""
        async with placement_of(self.config).services(say), AsyncExitStack() as stack:
            if episodes:
                await stack.enter_async_context(self.toolbox.running(say))
                await stack.enter_async_context(self.plan.running())
            await stack.enter_async_context(self.scoring.running())
            yield


def prepare(
    config: Config,
    split: str,
    *,
    samples: Iterable[Sample] | None = None,
    limit: int | None = None,
    tools: Sequence[Tool | Callable[..., object]] | None = None,
    scorer: Scorer | None = None,
    interaction: UserLike | None = None,
    beside: Prepared | None = None,
) -> Prepared:
    """Resolve every name for this split; what is given here replaces the configured parts. `beside` is another split
    of the same run, whose tools serve both."""
    from turnwise.data.python_samples import program_samples

    check_config(config)
    where = placement_of(config)
    where.check()
    if isinstance(tools, str) or not isinstance(tools, Iterable | None):
        raise PluginError(f"tools is a list of tools, not {type(tools).__name__}")
    if beside is not None:
        loaded = beside.toolbox.shared()
    else:
        specs = config.rollout.tools if tools is None else []
        loaded = [each for spec in specs for each in load_tools(spec, config)]
        loaded += [as_tool(entry) for entry in tools or ()]
    toolbox = Toolbox(loaded, config.rollout, config)
    users = Users(config, interaction)
    chosen = load_samples(config, split, limit) if samples is None else program_samples(samples, limit)
    if not chosen:
        raise DataError("there are no samples")
    plan = Plan(chosen, config, toolbox, users)
    renders = extensions.engine(config.engine.name).renders
    if not renders and toolbox.tools:
        plan.notices.append(UNCOUNTED)
    sources = sorted({sample.data_source for sample in chosen})
    own = None if scorer is None else as_scorer(scorer, getattr(scorer, "__qualname__", type(scorer).__name__))
    runner = where.runner() if own is None else None
    scoring = Scoring.of(config.scoring, sources, own, task_scorers=known_scorers(), runner=runner)
    renderer, dropped, model = None, 0, None
    if renders:
        model = choose_model(config)
        renderer = make_renderer(config)
        if any(route.tools for route in plan.routes):
            demand_readable_calls(config, renderer.tokenizer)
        rows = None if model is None else model[1].vocab_size
        chosen, dropped = fit_prompts(chosen, config, renderer, plan, toolbox, rows)
    if scorer is None:
        Scoring.check(config.scoring, chosen, task_scorers=known_scorers())
    choice = None if model is None else model[0]
    objects = {"samples": samples, "tools": tools or None, "scorer": scorer, "interaction": interaction}
    of_caller = tuple(name for name, value in objects.items() if value is not None)
    return Prepared(
        config, chosen, dropped, choice, renderer, toolbox, users, plan, scoring, split=split, of_caller=of_caller
    )


def load_samples(config: Config, split: str, limit: int | None) -> list[Sample]:
    """Samples of the configured files, or else of the task's generator."""
    from turnwise.data.custom_dataset import dataset_rows
    from turnwise.data.files import Split
    from turnwise.data.images.cells import ImageCells
    from turnwise.data.loader import load_samples as read_samples
    from turnwise.data.rows import as_row
    from turnwise.data.samples import to_sample

    key = "train_files" if split == "train" else "eval_files"
    files = config.data.train_files if split == "train" else config.data.eval_files
    spec = config.task
    task = None if spec is None else load_task(spec)
    if files:
        made_by_task = task is not None and task.prepare is not None and task.defaults.get(f"data.{key}") == files
        if made_by_task and not any(Path(name).expanduser().exists() for name in files):
            raise ConfigError(f"no file {files[0]} (from {Path.cwd()}); make it with `turnwise prepare {spec}`")
        key_of_prompt, source = config.data.prompt_key, config.data.default_source
        if config.data.dataset is not None:
            rows = dataset_rows(config.data.dataset, files, key_of_prompt, lambda: _tokenizer(config))
            images = ImageCells(config.data.images_from)
            return [
                to_sample(
                    as_row(values, Path(files[0]).with_name(split), number, split),
                    prompt_key=key_of_prompt,
                    default_source=source,
                    images=images,
                )
                for number, values in enumerate(islice(rows, limit))
            ]
        read = read_samples(
            files,
            split=Split.TRAIN if split == "train" else Split.EVAL,
            prompt_key=key_of_prompt,
            default_source=source,
            images_from=config.data.images_from,
        )
        return read if limit is None else read[:limit]
    if config.data.dataset is not None and not (config.data.train_files or config.data.eval_files):
        raise ConfigError(f"data.dataset={config.data.dataset} reads files, and there are none: set data.{key}=FILE")
    if spec is None or task is None:
        raise ConfigError(f"nothing to read: set data.{key}=FILE or task=NAME")
    if task.rows is None:
        raise ConfigError(f"task={spec} reads files: make them with `turnwise prepare {spec}`, then set data.{key}")
    if limit is None and task.endless:
        raise ConfigError(f"the {spec} task makes endless rows: set training.samples and eval.samples to a number")
    generated = call(lambda: list(islice(rows_of(task, spec, split, config.seed), limit)), spec, "task")
    return [
        to_sample(as_row(values, Path(split), number, f"{spec}/{split}"), prompt_key=config.data.prompt_key)
        for number, values in enumerate(generated)
    ]


def _tokenizer(config: Config) -> object:
    """The library's tokenizer of the configured model, for a dataset of the user's; None where an endpoint has it."""
    if not extensions.engine(config.engine.name).renders:
        return None
    return make_renderer(config).tokenizer.hf


def fit_prompts(
    samples: list[Sample], config: Config, renderer: "Renderer", plan: Plan, toolbox: Toolbox, rows: int | None
) -> tuple[list[Sample], int]:
    """(samples whose first prompt fits, how many did not), counted with the tools the model will really see."""

    from turnwise.data.loader import drop_overlong

    def count(sample: Sample) -> int:
        media = measured_images(sample, config, renderer)
        ids = renderer.prompt(sample.prompt, toolbox.schemas(plan.route(sample).tools), media).ids
        if rows is not None and max(ids, default=0) >= rows:
            raise EngineError(
                f"sample {sample.id}: the tokenizer gives token {max(ids)} and the model of {config.model.path} knows "
                f"only {rows}: they do not belong together"
            )
        return len(ids)

    return drop_overlong(samples, count, config.data.max_prompt_tokens, config.data.overlong)


def spelled_warning(renderer: "Renderer") -> str:
    """Of a template whose marks between turns the model has never seen as tokens."""
    marks = " and ".join(renderer.spelled_marks)
    return f"the tokenizer has no token for {marks}, which the chat template writes between turns: they are plain text"


def sample_per_route(prepared: Prepared) -> dict[Route, Sample]:
    """The first sample of every route."""
    return {prepared.plan.route(sample): sample for sample in reversed(prepared.samples)}


_forecasts: "weakref.WeakKeyDictionary[Renderer, dict[Route, TemplateForecast]]" = weakref.WeakKeyDictionary()
"""What was tried already: the plan tells it and the checks judge it."""


def history_forecasts(prepared: Prepared, renderer: "Renderer") -> "dict[Route, TemplateForecast]":
    """What becomes of the tokens so far when tools and users reply, for every route."""
    from turnwise.chat.template.history_forecast import forecast
    from turnwise.chat.template.trials import BLANK

    by_route = _forecasts.setdefault(renderer, {})
    for route, sample in sample_per_route(prepared).items():
        if route in by_route:
            continue
        media = measured_images(sample, prepared.config, renderer)
        if renderer.images is not None:
            media[BLANK] = renderer.images.blank
        schemas, user = prepared.toolbox.schemas(route.tools), route.interaction is not None
        tools = bool(route.tools)
        by_route[route] = forecast(renderer, sample.prompt, schemas, tools=tools, user=user, media=media)
    return by_route


def measured_images(sample: Sample, config: Config, renderer: "Renderer") -> dict[Image, Media]:
    """Blocks of tokens for the images of a prompt, by their sizes; DataError where they cannot be shown."""
    images, most, processor = images_in(sample.prompt), config.rollout.max_images, renderer.images
    if processor is None:
        if images or sample.images:
            why = renderer.text_only or "its folder has no image processor"
            raise DataError(f"sample {sample.id} has images, and {config.model.path} reads text only: {why}")
        return {}
    for message in sample.prompt:
        if message.images and message.role not in renderer.image_roles:
            raise DataError(
                f"sample {sample.id}: the chat template does not show every image of a {message.role} message once and "
                "in order; take the model's own (chat.template=null)"
            )
    if most is not None and len(images) > most:
        raise DataError(f"sample {sample.id} has {len(images)} images, and rollout.max_images={most}")
    media: dict[Image, Media] = {}
    for image in images:
        try:
            with open_source(image.source) as file:
                media[image] = processor.measure(file)
        except DataError as error:
            raise DataError(f"sample {sample.id}: {error}") from error
    return media


@asynccontextmanager
async def open_context(
    prepared: Prepared,
    script: "Script | None" = None,
    *,
    episodes: bool = True,
    sampling: SamplingConfig | None = None,
    say: Callable[[str], None] | None = None,
) -> AsyncIterator[RolloutContext]:
    """The context with its engine running; the engine is closed on every path.

    A script replaces the engine, `sampling` the config's. `say` is told what was measured and decided meanwhile.
    Without `episodes`, which other processes play, tools are not started.
    """
    tell, drawn = say or (lambda text: None), sampling or prepared.config.sampling
    async with prepared.running(tell, episodes=episodes), engine_context(prepared, script, drawn, tell) as context:
        yield context


@asynccontextmanager
async def engine_context(
    prepared: Prepared, script: "Script | None", sampling: SamplingConfig, tell: Callable[[str], None]
) -> AsyncIterator[RolloutContext]:
    """The context with its engine running, where tools and scorers run already."""
    from turnwise.engines.samplers.scripted import scripted_sampler
    from turnwise.rollout.scripted_backend import ScriptedBackend

    config = prepared.config
    if script is None and not extensions.engine(config.engine.name).renders:
        endpoint = opener_of(config).connect(config.engine)
        try:
            await endpoint.check()
            yield endpoint_context(prepared, lambda tools: endpoint, sampling)
        finally:
            await endpoint.close()
        return
    renderer = prepared.renderer or make_renderer(config)
    if script is not None:
        scripted, sample_of = scripted_sampler(renderer, script), {sample.id: sample for sample in prepared.samples}.get
        speaks = partial(ScriptedBackend, script=scripted, sample_of=sample_of)
        yield token_context(prepared, renderer, scripted, sampling, speaks)
        return
    async with placement_of(config).open_sampler(renderer, tell) as sampler:
        yield token_context(prepared, renderer, sampler, sampling)


def endpoint_context(
    prepared: Prepared, endpoint_for: "Callable[[list[JsonSchema]], Endpoint]", sampling: SamplingConfig
) -> RolloutContext:
    """A context whose episodes are written as messages by the endpoint that is chosen for an episode's tools."""
    from turnwise.rollout.endpoint_backend import EndpointBackend

    config = prepared.config
    call_format = load_format(config.chat.tool_format)

    def backend(conversation: str, noise: NoiseKey, tools: list[JsonSchema]) -> EndpointBackend:
        chosen, most = endpoint_for(tools), config.chat.max_pixels
        return EndpointBackend(chosen, sampling, tools, noise, call_format, max_pixels=most)

    return _context(prepared, sampling, backend)


def token_context(
    prepared: Prepared,
    renderer: "Renderer",
    sampler: Sampler,
    sampling: SamplingConfig,
    make_backend: Callable[..., TokenBackend] = TokenBackend,
) -> RolloutContext:
    """A context whose episodes are written token by token by this sampler."""

    retry = replace(LOST_RETRY, retries=prepared.config.engine.retries)
    with_images = [sample for sample in prepared.samples if sample.images or images_in(sample.prompt)]
    if with_images and not sampler.capabilities.media:
        why = f": {renderer.text_only}" if renderer.text_only else ""
        raise DataError(
            f"sample {with_images[0].id} has images; the {prepared.config.engine.name} engine reads text only{why}"
        )

    unread = format_of(prepared.config, renderer.tokenizer).problem

    def backend(conversation: str, noise: NoiseKey, tools: list[JsonSchema]) -> TokenBackend:
        if tools and unread is not None:  # of an agent's own, which no plan knows
            raise TemplateError(unread)
        return make_backend(renderer, sampler, sampling, tools, noise, conversation, retry)

    return _context(prepared, sampling, backend, sampler)


def _context(
    prepared: Prepared, sampling: SamplingConfig, make_backend: MakeBackend, sampler: Sampler | None = None
) -> RolloutContext:
    config = replace(prepared.config, sampling=sampling)
    kind = adapted("conversation", config, {}) or Conversation
    return RolloutContext(config, prepared.plan, prepared.toolbox, prepared.users, make_backend, kind, sampler)
