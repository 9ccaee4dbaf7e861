"""The chat template tried with the tools and users of a plan: does it only append, show tools, read calls back?"""

from typing import Any

from turnwise.assemble import Prepared, history_forecasts, sample_per_route, spelled_warning
from turnwise.chat.renderer import CHATML, Renderer
from turnwise.chat.replies import fresh_mark
from turnwise.checks.findings import Outcome, Report
from turnwise.engines.rendering import format_of
from turnwise.errors import TemplateError
from turnwise.types import JsonSchema, Message, Role, ToolCall


def check_template(prepared: Prepared, renderer: Renderer, report: Report) -> None:
    """Does the template only append? Tried on every kind of reply this plan can bring, alone and one after another."""
    _check_generation_prompt(renderer)
    found = list(history_forecasts(prepared, renderer).values())
    for one in found:
        if one.refused is not None:
            raise TemplateError(one.refused)
    if renderer.spelled_marks:
        report.add("chat template", Outcome.WARNING, spelled_warning(renderer))
    for text, warns in {one.text: one.warns for one in found}.items():
        report.add("chat template", Outcome.WARNING if warns else Outcome.OK, text)


def _way_out(renderer: Renderer) -> str:
    """Another template: ours where the model knows its marks."""
    if all(mark in renderer.tokenizer.added_ids for mark in CHATML):
        return "try chat.template=chatml_hermes"
    return "set chat.template=FILE to one that does (chatml_hermes writes marks that this tokenizer has not as tokens)"


def _check_generation_prompt(renderer: Renderer) -> None:
    """A template that ignores add_generation_prompt leaves the policy to write the header of its own message."""
    hello = Message(Role.USER, "hello")
    opened = renderer.render([hello], (), reply=True)
    mark = fresh_mark([opened])
    shown = renderer.render([hello, Message(Role.ASSISTANT, mark)], (), reply=False)
    head = shown.removeprefix(opened).partition(mark)[0].strip()
    if opened == renderer.render([hello], (), reply=False) and shown.startswith(opened) and head:
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
    shown = f"shown to the model and read back: {', '.join(names)}" if names else "no tools"
    report.add("tool schemas", Outcome.OK, shown)


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
