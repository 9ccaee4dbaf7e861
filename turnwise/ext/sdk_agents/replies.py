"""A turn of the policy as a client sees it, and what of a call is tried before one is written for it."""

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from turnwise.chat.images.pixels import shown_size
from turnwise.errors import PluginError, one_line
from turnwise.ext.sdk_agents.calls import Call, ClientReply, Finish, Refused
from turnwise.rollout.chat_backends import ChatBackend, TokenBackend
from turnwise.rollout.openai_messages import check_image
from turnwise.rollout.toolbox.schema import ArgumentChecker, BadArguments, CheckTookTooLong, check_number, check_size
from turnwise.system.image_sources import open_source
from turnwise.types import CallRecord, CallStatus, FinishReason, Image, ToolCall, Turn


async def reply_to(
    call: Call, turn: Turn, backend: ChatBackend, stops: Sequence[str], checkers: Mapping[str, ArgumentChecker]
) -> ClientReply:
    """The turn that was written for a call, as its client sees it; `stops` are all stop strings it was written with."""
    tool_calls = turn.message.tool_calls
    if call.hides_calls:
        reply = as_reply(turn, stops, frozenset(tool_call.id for tool_call in tool_calls), CallStatus.REFUSED)
    else:
        reply = as_reply(turn, stops, await _misfits(checkers, tool_calls), CallStatus.BAD_ARGUMENTS)
    return replace(reply, tokens=_tokens(turn, backend)) if call.logprobs else reply


def as_reply(turn: Turn, stops: Sequence[str], misfits: Collection[str], status: CallStatus) -> ClientReply:
    """A turn as a client sees it. A call that cannot be read, or is a misfit by its id, is none there: the text shows
    it, and the record has it with this status."""
    message = turn.message
    readable = [call for call in message.tool_calls if call.problem is None]
    calls = tuple(call for call in readable if call.id not in misfits)
    turn.calls += [CallRecord(call, status, 0.0) for call in readable if call not in calls]
    text = message.visible if len(calls) == len(message.tool_calls) else message.text
    stop = None
    if turn.finish_reason is FinishReason.STOP and not calls:
        stop = next((candidate for candidate in stops if message.text.endswith(candidate)), None)
        if stop is not None:  # SDKs' users expect it cut off; it stays on the record
            text = text.removesuffix(stop) if text.endswith(stop) else text.removesuffix(stop.rstrip())
    finish = Finish.STOP if stop is None else Finish.STOP_STRING
    if turn.finish_reason is FinishReason.LENGTH:
        finish = Finish.LENGTH
    elif calls:
        finish = Finish.TOOL_CALLS
    return ClientReply(
        text=text,
        calls=calls,
        reasoning=message.reasoning,
        finish=finish,
        stop_string=stop,
        prompt_tokens=turn.prompt_tokens,
        completion_tokens=turn.completion_tokens,
    )


def check_heads(images: Sequence[Image], *, by_us: bool) -> None:
    """DataError for the first that cannot be shown: too many bytes or pixels, or no image. No pixel is unpacked."""
    for image in images:
        check_image(image)
        if by_us or image.source.startswith("data:"):  # an endpoint fetches the others itself
            with open_source(image.source) as file:
                shown_size(file, None)


def check_tools(call: Call) -> None:
    """Refused for more tools, or larger ones, than a model can be shown."""
    try:
        check_number(len(call.tools), "tools")
        for schema in call.tools:
            check_size(schema, schema["function"]["name"])
    except PluginError as error:
        raise Refused(f"tools: {one_line(error)}", code="invalid_schema") from error


def strict_checkers(call: Call) -> dict[str, ArgumentChecker]:
    """Those of the tools that the client wants strict; Refused for a schema that is none."""
    named = {schema["function"]["name"]: schema for schema in call.tools}
    try:
        return {name: _checker(name, json.dumps(named[name])) for name in sorted(call.strict)}
    except PluginError as error:
        raise Refused(f"tools: {one_line(error)}", code="invalid_schema") from error


@functools.lru_cache(maxsize=256)
def _checker(name: str, schema: str) -> ArgumentChecker:
    return ArgumentChecker.of(json.loads(schema), name)


async def _misfits(checkers: Mapping[str, ArgumentChecker], calls: Sequence[ToolCall]) -> frozenset[str]:
    """The ids of the calls that do not fit, or of which nobody knows in time."""
    ids = []
    for call in calls:
        if call.name in checkers and call.problem is None:
            try:
                await checkers[call.name].check(call.arguments)
            except (BadArguments, CheckTookTooLong):
                ids.append(call.id)
    return frozenset(ids)


def _tokens(turn: Turn, backend: ChatBackend) -> list[tuple[str, float]]:
    """The words of a turn that was just written, token by token."""
    if not isinstance(backend, TokenBackend):
        raise Refused("logprobs: this run's engine tells none")
    ledger, end = backend.segments[turn.segment], turn.start + turn.completion_tokens
    words = [backend.renderer.tokenizer.decode([token]) for token in ledger.token_ids[turn.start : end].tolist()]
    return list(zip(words, ledger.logprobs[turn.start : end].tolist(), strict=True))
