"""The chat template tried with the tools and users of a plan: does it only append, show tools, read calls back?"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from turnwise.assemble import Prepared, measured_images
from turnwise.chat.image_blocks import images_in
from turnwise.chat.renderer import History, Renderer
from turnwise.chat.replies import fresh_mark
from turnwise.checks.findings import Outcome, Report
from turnwise.engines.rendering import format_of
from turnwise.errors import EpisodeError, TemplateError
from turnwise.media import Media
from turnwise.rollout.plan import Route
from turnwise.types import (
    Completion,
    FinishReason,
    Image,
    JsonSchema,
    Ledger,
    Message,
    Origin,
    Role,
    Sample,
    Text,
    ToolCall,
)

BLANK = Image("data:,")
"""Stands for an image that a tool draws."""
Exchange = tuple[str, str, list[Message]]
"""(its name, what the assistant says, what it is answered)."""


def sample_per_route(prepared: Prepared) -> dict[Route, Sample]:
    """The first sample of every route."""
    return {prepared.plan.route(sample): sample for sample in reversed(prepared.samples)}


def check_template(prepared: Prepared, renderer: Renderer, report: Report) -> None:
    """Does the template only append? Tried on every kind of reply this plan can bring, alone and one after another."""
    _check_generation_prompt(renderer)
    kwargs = prepared.config.chat.template_kwargs
    strict = Renderer(renderer.tokenizer, renderer.call_format, template_kwargs=kwargs, images=renderer.images)
    rewriting = []
    for route, sample in sample_per_route(prepared).items():
        schemas = prepared.toolbox.schemas(route.tools)
        exchanges = list(_exchanges(renderer, bool(route.tools), route.interaction is not None))
        media = measured_images(sample, prepared.config, renderer)
        if renderer.images is not None:
            media[BLANK] = renderer.images.blank
        longer = [("several of these", [exchange for _ in range(2) for exchange in exchanges])] if exchanges else []
        for name, some in [*((exchange[0], [exchange]) for exchange in exchanges), *longer]:
            try:
                _play(strict, sample, schemas, some, media)
            except (TemplateError, EpisodeError) as error:
                if renderer.history is History.REFUSE:
                    raise TemplateError(f"{name}: {error}") from error
                rewriting.append(name)
    if rewriting:
        names = ", ".join(dict.fromkeys(rewriting))
        report.add("chat template", Outcome.WARNING, f"rewrites history at: {names}; handled as {renderer.history}")
    else:
        report.add("chat template", Outcome.OK, "only appends; earlier tokens never change")


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
            "before an assistant's words; try chat.template=chatml_hermes"
        )


def _play(
    renderer: Renderer,
    sample: Sample,
    schemas: Sequence[JsonSchema],
    exchanges: Sequence[Exchange],
    media: dict[Image, Media],
) -> None:
    """The exchanges as an episode records them, then a last answer and the comparison with one full render."""
    ledger, messages = Ledger(), list(sample.prompt)
    prompt = renderer.prompt(messages, schemas, media)
    ledger.append(prompt.ids, Origin.PROMPT, 0)
    ledger.place_at(prompt.media)
    thought = renderer.template.thought
    for turn, (_, text, replies) in enumerate([*exchanges, ("", "It is 42.", [])]):
        opened = bool(thought) and renderer.tokenizer.decode(ledger.token_ids[-8:]).endswith(thought)
        said = renderer.call_format.render_thought("six sevens", is_open=True) + text if opened else text
        written = renderer.tokenizer.encode(said, after="").ids
        if renderer.end_id is not None and written[-1] not in renderer.stop_ids:  # a call may end the turn
            written = [*written, renderer.end_id]
        ids = tuple(written)
        completion = Completion.of(ids, [0.0] * len(ids), FinishReason.STOP, version=0)
        message = renderer.read(completion, turn, ledger.token_ids, schemas)
        ledger.append(ids, Origin.POLICY, turn, completion.logprobs, completion.versions)
        if replies:
            ledger.append_given(renderer.extend(messages, message, completion, replies, schemas, media), turn)
            ledger.place([media[image] for image in images_in(replies)])
        messages += [message, *replies]
    problem = renderer.check(ledger, messages, schemas, media).problem
    if problem is not None:
        raise TemplateError(f"the recorded tokens differ from a full render {problem}")


def _exchanges(renderer: Renderer, tools: bool, user: bool) -> Iterator[Exchange]:
    """The exchanges an episode may hold."""
    if tools:
        calls = [ToolCall("t000c0000", "probe", {"x": "6*7"}), ToolCall("t000c0001", "probe", {"x": "7*6"})]
        for count in (1,) if renderer.call_format.CALL_ENDS else (1, 2):  # a call may end the turn
            text = "\n".join(renderer.call_format.render_call(call) for call in calls[:count])
            read: Message = renderer.call_format.parse(text, turn=0, in_reasoning=False)
            replies = [Message(Role.TOOL, "42", tool_call_id=call.id, name="probe") for call in read.tool_calls]
            yield f"{count} tool call(s), then the tool", text, replies
            if Role.TOOL in renderer.image_roles:
                seen = [replace(reply, content=(Text("42"), BLANK, Text("."))) for reply in replies]
                yield f"{count} tool call(s), then the tool with an image", text, seen
    if user:
        sure = [Message(Role.USER, "Are you sure?")]
        answer = f"{renderer.call_format.ANSWER}It is 42."
        yield "plain answer, then the user", answer, sure
        if not renderer.in_reasoning:  # else every answer is given some
            thought = renderer.call_format.render_thought("six sevens", is_open=False)
            yield "answer with reasoning, then the user", thought + answer, sure


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
                    "know the tool; try chat.template=chatml_hermes"
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
