"""The one function behind `check`, `eval` and `train`: what is wrong with data, template, tools, scorers or engine."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from turnwise.assemble import Prepared
from turnwise.chat.image_blocks import images_in
from turnwise.checks.conversations import check_schemas, check_template
from turnwise.checks.findings import Outcome, Report
from turnwise.checks.rollouts import TIMED_OUT, check_rollouts
from turnwise.choices import EngineName
from turnwise.cluster.opening import samples_there
from turnwise.config.inputs import FOREIGN
from turnwise.data.lint import faults
from turnwise.engines.memory_plan import memory_here
from turnwise.engines.opening import find_own, open_endpoint
from turnwise.engines.opening_foreign import check_foreign
from turnwise.engines.rendering import choose_model
from turnwise.engines.samplers.scripted import lines
from turnwise.errors import DataError, EngineError
from turnwise.image_bytes import KINDS, media_type
from turnwise.image_sources import is_inline, open_source
from turnwise.knobs import is_plugin
from turnwise.rollout.openai_messages import check_image
from turnwise.storage.images import images_for
from turnwise.types import Sample

ENDPOINT_SECONDS = 5.0
SLOW_SECONDS = 3.0


async def check_before_run(*prepared: Prepared, say: Callable[[str], None]) -> None:
    """Stop a run before anything is written, with the words `turnwise check` would have used.

    `say` gets a line when it takes long, and one for what took too long.
    """
    report = Report()
    waiting = "one scripted episode per data source is being tried out: tools, users or scorers take their time"
    slow_notice = asyncio.get_running_loop().call_later(SLOW_SECONDS, say, waiting)
    try:
        await run_checks(prepared, report)
    finally:
        slow_notice.cancel()
    report.raise_errors()
    for finding in report.findings:
        if finding.check == TIMED_OUT:
            say(f"{finding.check}: {finding.text}")


async def run_checks(every: Sequence[Prepared], report: Report, *, play: bool = True) -> None:
    """Try everything out; a check that needs the result of a failed one is left out. Without `play` no episode is."""
    known = len(report.errors)
    with report.recording("engine"):
        _check_cacheable(every[0])  # one model writes for all
    for prepared in every:
        with report.recording("dataset"):
            _check_samples(prepared)
        if prepared.renderer is None:
            with report.recording("endpoint"):
                await _check_endpoint(prepared, report)
            continue
        if prepared.config.engine.name == EngineName.scripted:
            with report.recording("engine"):
                lines(prepared.config.engine.script)
        if prepared.config.engine.name in FOREIGN and not samples_there(prepared.config):  # else by those who start it
            with report.recording("engine"):
                report.add("engine", Outcome.OK, await check_foreign(prepared.config))
        if is_plugin(prepared.config.engine.name):
            with report.recording("engine"):
                find_own(prepared.config.engine.name)
        with report.recording("chat template"):
            check_template(prepared, prepared.renderer, report)
        with report.recording("tool schemas"):
            check_schemas(prepared, prepared.renderer, report)
    if len(report.errors) > known or not play:
        return
    with report.recording("started"):
        async with AsyncExitStack() as services:
            for prepared in every:
                running = prepared.running(lambda text: report.add("started", Outcome.OK, text))
                await services.enter_async_context(running)
            for prepared in every:
                await check_rollouts(prepared, report)


def _check_cacheable(prepared: Prepared) -> None:
    """Refuse what is known before its weights are read, a GPU that is too small for them included;
    `threads.check_cacheable` refuses what only they show."""
    chosen = choose_model(prepared.config)
    if chosen is not None and (layers := chosen[1].stateful) is not None:
        kind = chosen[1].model_type
        raise EngineError(
            f"the torch sampler cannot write with this model: {layers} ({kind}) carry a state from token to token that "
            "is not attention"
        )
    memory_here(prepared.config, None)


def _check_samples(prepared: Prepared) -> None:
    """Rows that can be read and yet make no sense."""
    found = [
        (sample, fault) for sample in prepared.samples for fault in faults(sample, prepared.config.data.prompt_key)
    ]
    if found:
        sample, fault = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise DataError(f"sample {sample.id}: {fault}{more}")
    for name, tool in prepared.toolbox.tools.items():
        reads = getattr(tool, "reads_kwargs", ())
        if isinstance(reads, tuple) and "image" in reads:
            for sample in prepared.samples:
                _check_tool_images(sample, name)


def _check_tool_images(sample: Sample, tool: str) -> None:
    """What a row gives a tool to look at: a file that is no image would fail every episode that calls the tool."""
    try:
        for image in images_for(sample, sample.tools_kwargs.get(tool, {})).values():
            if is_inline(image.source):
                continue  # whoever wrote it into the row has seen it
            with open_source(image.source) as file:
                if media_type(file.read(16)) is None:
                    raise DataError(f"the image {image.source} is not a {KINDS} image")
    except DataError as error:
        raise DataError(f"sample {sample.id}: tools_kwargs.{tool}: {error}") from error


async def _check_endpoint(prepared: Prepared, report: Report) -> None:
    """Is it there, does it serve the model, and can every image be sent?"""
    engine = dataclasses.replace(prepared.config.engine, timeout_seconds=ENDPOINT_SECONDS, retries=0)
    endpoint = open_endpoint(engine)
    try:
        # the plan and config.yaml then name the model that answers, also when it was asked from the endpoint
        prepared.config.engine.model = await endpoint.check()
        report.add("endpoint", Outcome.OK, f"{endpoint.base_url} serves {endpoint.model}")
    finally:
        await endpoint.close()
    most = prepared.config.rollout.max_images
    for sample in prepared.samples:
        if most is not None and len(images_in(sample.prompt)) > most:
            raise DataError(
                f"sample {sample.id} has {len(images_in(sample.prompt))} images, and rollout.max_images={most}"
            )
        for image in sample.images:
            check_image(image)
