"""From a Config to a stage: samples, renderer, tools, users, plan and scorers, and last of all the engine."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module, resources
from itertools import islice
from pathlib import Path

from turnwise.chat.renderer import History, Renderer
from turnwise.chat.tokenizer import Tokenizer
from turnwise.choices import EngineName
from turnwise.config import Config, SamplingConfig
from turnwise.data.loader import drop_overlong
from turnwise.data.loader import load_samples as read_samples
from turnwise.data.rows import Row
from turnwise.data.samples import to_sample
from turnwise.engines.sampler import NoiseKey, Sampler
from turnwise.engines.scripted import Script, ScriptedSampler, lines
from turnwise.errors import ConfigError, DataError, EngineError, unknown
from turnwise.plugins import builtin, load, names_in
from turnwise.rollout.episode import MakeSpeaker, Stage
from turnwise.rollout.plan import Plan
from turnwise.rollout.speakers import EndpointSpeaker, TokenSpeaker
from turnwise.rollout.toolbox import Toolbox, as_tool, load_tool
from turnwise.rollout.tools.tool import Tool
from turnwise.rollout.users import Interactions
from turnwise.scoring.scorer import Scorer
from turnwise.scoring.service import Scoring
from turnwise.types import JsonSchema, Sample

MODELS_PACKAGE = "turnwise.models"


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything but the model: whatever is wrong with names, rows, tools or templates has come out by now."""

    config: Config
    samples: list[Sample]
    dropped: int
    """Samples left out because their prompt is too long."""
    renderer: Renderer | None
    """None for endpoints, which render for themselves."""
    toolbox: Toolbox
    interactions: Interactions
    plan: Plan
    scoring: Scoring

    @asynccontextmanager
    async def running(self, say: Callable[[str], None]) -> AsyncIterator[None]:
        """What tools and scorers need is started, and stopped on every path."""
        async with self.toolbox.running(say), self.scoring.running():
            yield


def prepare(
    config: Config,
    split: str,
    *,
    samples: Iterable[Sample] | None = None,
    limit: int | None = None,
    tools: Sequence[Tool | Callable[..., object]] | None = None,
    scorer: Scorer | None = None,
) -> Prepared:
    """Resolve every name for this split; `samples`, `tools` and `scorer` given here replace the configured ones."""
    specs = config.rollout.tools if tools is None else []
    found = [*(load_tool(spec, config.sandbox) for spec in specs), *(as_tool(entry) for entry in tools or ())]
    toolbox = Toolbox(found, config.rollout, config.sandbox)
    interactions = Interactions(config.rollout)
    chosen = list(islice(samples, limit)) if samples is not None else load_samples(config, split, limit)
    if not chosen:
        raise DataError("there are no samples")
    plan = Plan(chosen, config.rollout, toolbox, interactions)
    sources = sorted({sample.data_source for sample in chosen})
    scoring = Scoring.of(config.scoring, sources, scorer)
    renderer, dropped = None, 0
    if config.engine.name is not EngineName.openai:
        renderer = make_renderer(config)
        chosen, dropped = fit_prompts(chosen, config, renderer, plan, toolbox)
    if scorer is None:
        Scoring.check(config.scoring, chosen)
    return Prepared(config, chosen, dropped, renderer, toolbox, interactions, plan, scoring)


def load_samples(config: Config, split: str, limit: int | None) -> list[Sample]:
    """Samples of the configured files, or else of the task's generator."""
    files = config.data.train_files if split == "train" else config.data.eval_files
    if files:
        if config.task == "gsm8k" and not any(Path(name).expanduser().exists() for name in files):
            raise ConfigError(f"no file {files[0]} (from {Path.cwd()}); make it with `turnwise prepare gsm8k`")
        found = read_samples([Path(name) for name in files], prompt_key=config.data.prompt_key)
        return found if limit is None else found[:limit]
    if config.task is None:
        key = "train_files" if split == "train" else "eval_files"
        raise ConfigError(f"nothing to read: set data.{key}=FILE or task=NAME")
    if config.task == "gsm8k":
        raise ConfigError("task=gsm8k reads files: make them with `turnwise prepare gsm8k`, then set data.eval_files")
    rows = load(config.task, "task") if ":" in config.task else builtin("turnwise.tasks", config.task, "task").rows
    if limit is None and config.task == "arithmetic":
        raise ConfigError("the arithmetic task has no end: set eval.samples to a number")
    made = islice(rows(split, config.seed), limit)
    return [
        to_sample(Row(Path(split), number, values, f"{config.task}/{split}"), prompt_key=config.data.prompt_key)
        for number, values in enumerate(made)
    ]


def model_folder(path: str) -> Path:
    """The folder of a model: an embedded one by name, or a path."""
    embedded = names_in(MODELS_PACKAGE)
    if path in embedded:
        return Path(str(resources.files(import_module(f"{MODELS_PACKAGE}.{path}"))))
    folder = Path(path).expanduser()
    if not folder.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return _from_hub(path)
    if not folder.is_dir():
        raise ConfigError(f"model.path: {unknown('model (no such folder or embedded model)', path, embedded)}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {folder} has no config.json; it must be a Hugging Face model folder")
    return folder


def _from_hub(name: str) -> Path:
    """A hub model's folder in the local cache, downloaded when it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.path: {name} is no local folder and the hub did not give it: {reason}") from error


def make_renderer(config: Config) -> Renderer:
    """The renderer of the configured model."""
    call_format = builtin("turnwise.chat.formats", config.chat.tool_format, "tool format")
    tokenizer = Tokenizer(model_folder(config.model.path), config.chat.template)
    return Renderer(
        tokenizer, call_format, history=History(config.chat.history.value), template_kwargs=config.chat.template_kwargs
    )


def fit_prompts(
    samples: list[Sample], config: Config, renderer: Renderer, plan: Plan, toolbox: Toolbox
) -> tuple[list[Sample], int]:
    """(samples whose first prompt fits, how many did not), counted with the tools the model will really see."""

    def count(sample: Sample) -> int:
        if sample.images:
            raise DataError(f"sample {sample.id} has images; the {config.engine.name.value} engine reads text only")
        return len(renderer.open(sample.prompt, toolbox.schemas(plan.route(sample).tools)))

    return drop_overlong(samples, count, config.data.max_prompt_tokens, config.data.overlong)


@asynccontextmanager
async def open_stage(
    prepared: Prepared, script: Script | None = None, *, say: Callable[[str], None] | None = None
) -> AsyncIterator[Stage]:
    """The stage with its engine running; the engine is closed on every path.

    A script replaces the engine. `say` is told what was measured and decided while it was opened.
    """
    async with prepared.running(say or (lambda text: None)), _engine(prepared, script, say) as stage:
        yield stage


@asynccontextmanager
async def _engine(prepared: Prepared, script: Script | None, say: Callable[[str], None] | None) -> AsyncIterator[Stage]:
    config = prepared.config
    if script is None and config.engine.name is EngineName.openai:
        from turnwise.engines.endpoint import ChatEndpoint

        if config.engine.base_url is None:
            raise ConfigError("engine=openai needs engine.base_url, such as http://127.0.0.1:8000/v1")
        endpoint = ChatEndpoint(
            config.engine.base_url,
            config.engine.model,
            os.environ.get(config.engine.api_key_env),
            config.engine.timeout_seconds,
            config.engine.retries,
        )
        call_format = builtin("turnwise.chat.formats", config.chat.tool_format, "tool format")
        try:
            await endpoint.check()

            def speak_text(conversation: str, noise: NoiseKey, tools: list[JsonSchema]) -> EndpointSpeaker:
                return EndpointSpeaker(endpoint, config.sampling, tools, noise, call_format)

            yield _stage(prepared, speak_text)
        finally:
            await endpoint.close()
        return
    renderer = prepared.renderer or make_renderer(config)
    sampler = open_sampler(config, renderer, script, say or (lambda text: None))
    try:
        yield token_stage(prepared, renderer, sampler, config.sampling)
    finally:
        await asyncio.shield(asyncio.ensure_future(sampler.close()))


def token_stage(prepared: Prepared, renderer: Renderer, sampler: Sampler, sampling: SamplingConfig) -> Stage:
    """A stage whose episodes are written token by token by this sampler."""

    def speak(conversation: str, noise: NoiseKey, tools: list[JsonSchema]) -> TokenSpeaker:
        return TokenSpeaker(renderer, sampler, sampling, tools, noise, conversation)

    return _stage(prepared, speak)


def open_sampler(config: Config, renderer: Renderer, script: Script | None, say: Callable[[str], None]) -> Sampler:
    """The configured sampler; a script replaces it."""
    if script is not None or config.engine.name is EngineName.scripted:
        if renderer.end_id is None:
            raise EngineError("the tokenizer names no end token; the scripted sampler cannot end a turn")
        return ScriptedSampler(renderer.tokenizer, script or lines(config.engine.script), end_id=renderer.end_id)
    import torch

    from turnwise.engines.decoder import Decoder
    from turnwise.engines.threads import choose_threads
    from turnwise.engines.torch_sampler import TorchSampler

    decoder = Decoder.load(model_folder(config.model.path), getattr(torch, config.model.precision.value))
    choice = choose_threads(decoder, config.engine.threads)
    measured = ", ".join(f"{count}: {1e3 * seconds:.1f} ms" for count, seconds in choice.seconds_per_step.items())
    bits = "bitwise independent of batching (proven)" if choice.invariant else "equal up to rounding only"
    say(f"torch engine: {choice.threads} thread(s) (a step took {measured}); results are {bits}")
    return TorchSampler(
        decoder, decode=renderer.tokenizer.decode, max_batch=config.engine.max_batch, threads=choice.threads
    )


def _stage(prepared: Prepared, make_speaker: MakeSpeaker) -> Stage:
    return Stage(prepared.config, prepared.plan, prepared.toolbox, prepared.interactions, make_speaker)
