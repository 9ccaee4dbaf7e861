"""The one function behind `check`, `eval` and `train`: what is wrong with data, template, tools, scorers or engine."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from turnwise.chat.control_tokens import fresh_mark
from turnwise.chat.images.blocks import images_in
from turnwise.chat.renderer import CHATML, Renderer
from turnwise.data.lint import faults
from turnwise.engines.memory_plan import memory_here
from turnwise.engines.opener import opener_of
from turnwise.engines.rendering import format_of
from turnwise.errors import DataError, TemplateError
from turnwise.reports.checks.findings import Outcome, Report
from turnwise.reports.checks.rollouts import TIMED_OUT, check_rollouts
from turnwise.rollout.openai_messages import check_image
from turnwise.rollout.prepare import Prepared, history_forecasts, sample_per_route, spelled_warning
from turnwise.storage.images.copies import images_for
from turnwise.system.image_bytes import KINDS, media_type
from turnwise.system.image_sources import is_inline, open_source
from turnwise.types import JsonSchema, Message, Role, Sample, ToolCall

ENDPOINT_SECONDS = 5.0
SLOW_SECONDS = 3.0


async def check_before_run(*prepared: Prepared, say: Callable[[str], None]) -> None:
    """Stop a run before anything is written, with the words `turnwise check` would have used.

    `say` gets a line when it takes long, and one for what took too long.
    """
    report = Report()
    waiting = "checking one scripted episode per data source; tools, users or scorers are slow"
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
    errors_before = len(report.errors)
    with report.recording("engine"):
        memory_here(every[0].config, None)  # one model writes for all: a GPU that is too small for it is refused here
    for prepared in every:
        with report.recording("dataset"):
            _check_samples(prepared)
        if prepared.renderer is None:
            with report.recording("endpoint"):
                await _check_endpoint(prepared, report)
            continue
        with report.recording("engine"):
            if (answer := await opener_of(prepared.config).check(prepared.config)) is not None:
                report.add("engine", Outcome.OK, answer)
        with report.recording("chat template"):
            check_template(prepared, prepared.renderer, report)
        with report.recording("tool schemas"):
            check_schemas(prepared, prepared.renderer, report)
    if len(report.errors) > errors_before or not play:
        return
    with report.recording("started"):
        async with AsyncExitStack() as services:
            for prepared in every:
                running = prepared.running(lambda text: report.add("started", Outcome.OK, text))
                await services.enter_async_context(running)
            for prepared in every:
                await check_rollouts(prepared, report)


def _check_samples(prepared: Prepared) -> None:
    """Rows that can be read and yet make no sense."""
    problems = [
        (sample, fault) for sample in prepared.samples for fault in faults(sample, prepared.config.data.prompt_key)
    ]
    if problems:
        sample, fault = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
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
    endpoint = opener_of(prepared.config).connect(engine)
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


def check_template(prepared: Prepared, renderer: Renderer, report: Report) -> None:
    """Does the template only append? Tried on every kind of reply this plan can bring, alone and one after another."""
    _check_generation_prompt(renderer)
    forecasts = list(history_forecasts(prepared, renderer).values())
    for forecast in forecasts:
        if forecast.refused is not None:
            raise TemplateError(forecast.refused)
    if renderer.spelled_marks:
        report.add("chat template", Outcome.WARNING, spelled_warning(renderer))
    for text, warns in {forecast.text: forecast.warns for forecast in forecasts}.items():
        report.add("chat template", Outcome.WARNING if warns else Outcome.OK, text)


def _way_out(renderer: Renderer) -> str:
    """Another template: ours where the model knows its marks."""
    if all(mark in renderer.tokenizer.added_ids for mark in CHATML):
        return "try chat.template=chatml_hermes"
    return "set chat.template=FILE to one that does (chatml_hermes needs tokens that this tokenizer lacks)"


def _check_generation_prompt(renderer: Renderer) -> None:
    """A template that ignores add_generation_prompt leaves the policy to write the header of its own message."""
    hello = Message(Role.USER, "hello")
    opened = renderer.render([hello], (), reply=True)
    mark = fresh_mark([opened])
    rendered = renderer.render([hello, Message(Role.ASSISTANT, mark)], (), reply=False)
    head = rendered.removeprefix(opened).partition(mark)[0].strip()
    if opened == renderer.render([hello], (), reply=False) and rendered.startswith(opened) and head:
        raise TemplateError(
            f"the chat template ignores add_generation_prompt: prompts would end without {head!r}, which stands "
            f"before an assistant's words; {_way_out(renderer)}"
        )


def check_schemas(prepared: Prepared, renderer: Renderer, report: Report) -> None:
    """Does the model see every tool, and can a call be read back as it was written?"""
    parse = renderer.call_format.parse
    for route, sample in sample_per_route(prepared).items():
        schemas = prepared.toolbox.schemas(route.tools)
        if not schemas:
            continue
        system = [message for message in sample.prompt if message.role is Role.SYSTEM]
        text = renderer.render([*system, Message(Role.USER, "hello")], schemas, reply=True)
        for function in (schema["function"] for schema in schemas):
            missing = [word for word in _words(function) if word not in text]
            if missing:
                raise TemplateError(
                    f"the chat template does not show {missing[0]!r} of tool {function['name']!r}: the model would not "
                    f"know the tool; {_way_out(renderer)}"
                )
            call = ToolCall("t000c0000", function["name"], example_arguments(function.get("parameters") or {}))
            written = renderer.call_format.render_call(call)
            read = parse(written, turn=0, in_reasoning=False, tools=schemas)
            back = [(c.name, c.arguments, c.problem) for c in read.tool_calls]
            if back != [(call.name, call.arguments, None)]:
                form = format_of(prepared.config, renderer.tokenizer).name
                raise TemplateError(
                    f"chat.tool_format={form}: a call of {call.name!r} is read back as {back or 'no call'}"
                )
    names = sorted({name for route in prepared.plan.routes for name in route.tools})
    summary = f"shown to the model and read back: {', '.join(names)}" if names else "no tools"
    report.add("tool schemas", Outcome.OK, summary)


def _words(function: JsonSchema) -> list[str]:
    properties = (function.get("parameters") or {}).get("properties") or {}
    return [function["name"], *properties]


def example_arguments(schema: JsonSchema) -> dict[str, Any]:
    """Arguments that fit a schema's required properties, for trying a call out on paper."""
    values: dict[str, Any] = {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    properties = schema.get("properties") or {}
    wanted = schema.get("required") or list(properties)
    return {
        name: entry["enum"][0] if entry.get("enum") else values.get(str(entry.get("type")), "x")
        for name, entry in properties.items()
        if name in wanted
    }
