"""OpenAI's responses: requests of items into calls, replies into responses, and the events of a stream of them."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field

from turnwise.ext.sdk_agents.calls import (
    OF_ANY_PART,
    Border,
    Call,
    ClientReply,
    Finish,
    Refused,
    content_of,
    image_of,
    note_other,
    noting,
    pieces,
    read_call,
    validated,
)
from turnwise.ext.sdk_agents.openai_chat import write_error
from turnwise.types import JsonSchema, Message, Part, Role, Text, ToolCall

__all__ = ["ResponsesCall", "output_items", "read", "stream", "write", "write_error"]

LOGPROBS = "message.output_text.logprobs"
ITEMS = ("message", "function_call", "function_call_output", "reasoning")


class _Part(Border):
    ignores = OF_ANY_PART
    type: Literal["input_text", "output_text", "input_image"]
    text: str = ""
    image_url: str | None = None
    detail: Literal["auto"] = "auto"
    logprobs: list[Any] = Field(default_factory=list)
    """As we sent them."""


class _Thought(Border):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _Item(Border):
    """Any item: those of a type have what they need, which is looked at when they are read."""

    ignores = OF_ANY_PART | {"phase", "encrypted_content", "namespace", "created_by"}
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[_Part] | list[_Thought] = ""
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    output: str | list[_Part] = ""
    summary: list[_Thought] = Field(default_factory=list)
    """As we sent it; what was thought is known from the record."""


class _Tool(Border):
    ignores = OF_ANY_PART | {"defer_loading"}
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False


class _TextFormat(Border):
    type: Literal["text"]


class _TextConfig(Border):
    ignores = frozenset({"verbosity"})
    format: _TextFormat | None = None


class _StreamOptions(Border):
    include_obfuscation: bool = False


class ResponsesRequest(Border):
    """The body of a request. A parameter that is not here, or has another value than these, is refused."""

    ignores = frozenset(
        {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"}
        | {"reasoning", "context_management", "max_tool_calls", "prompt_cache_options", "moderation", "truncation"}
    )
    model: str
    input: str | list[_Item] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    """Whether a later call may name this response as its previous one."""
    tools: list[_Tool] = Field(default_factory=list)
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(default_factory=list)
    """Thoughts are known from the record, whether or not they come back: there is nothing to encrypt."""
    # What changes nothing here, with the values for which that is so.
    stream_options: _StreamOptions | None = None
    top_logprobs: Literal[0] = 0
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: _TextConfig | None = None
    background: Literal[False] = False
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A request, the name of its response, and the messages that it goes on from when that is named."""

    request: ResponsesRequest
    id: str
    messages: tuple[Message, ...]

    @property
    def stream(self) -> bool:
        """Whether the reply is wanted as events."""
        return self.request.stream


def read(
    body: dict[str, Any], stored: Mapping[str, tuple[Message, ...]], items: Mapping[str, dict[str, Any]]
) -> tuple[Call, ResponsesCall]:
    """The call of a request, and the request for how it wants its reply; `stored` are the responses and `items` what
    was in them, which it may name."""
    body = _resolved(body, items)
    _check_types(body)
    with noting() as notes:
        request = validated(ResponsesRequest, body)
        note_other("tool_choice", request.tool_choice, "none" if request.tool_choice == "none" else "auto")
        note_other("parallel_tool_calls", request.parallel_tool_calls, True)
    before: tuple[Message, ...] = ()
    if request.previous_response_id is not None:
        if request.previous_response_id not in stored:
            text = f"previous_response_id: no response {request.previous_response_id[:80]!r} is kept in this session"
            raise Refused(text, code="previous_response_not_found")
        before = stored[request.previous_response_id]
    if isinstance(request.input, str):
        messages = (*before, Message(Role.USER, request.input))
    else:
        messages = (*before, *_messages(request.input))
    system = [Message(Role.SYSTEM, request.instructions)] if request.instructions else []
    if not messages:
        raise Refused("input: there is nothing to answer", code="invalid_message")
    call = Call(
        model=request.model,
        messages=(*system, *messages),  # instructions are for one response: the next one brings its own
        tools=tuple(_schema(tool) for tool in request.tools),
        strict=frozenset(tool.name for tool in request.tools if tool.strict),
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=LOGPROBS in request.include,
        hides_calls=request.tool_choice == "none",
        ignored=tuple(notes),
    )
    return call, ResponsesCall(request, f"resp_{uuid4().hex}", messages)


def write(reply: ClientReply, pending: ResponsesCall) -> dict[str, Any]:
    """The reply as a response object of the OpenAI responses API."""
    request, is_cut = pending.request, reply.finish is Finish.LENGTH
    return {
        "id": pending.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": output_items(reply, pending),
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_response_id,
        "store": request.store,
        "temperature": request.temperature,
        "tool_choice": "auto",
        "tools": [tool.model_dump() for tool in request.tools],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},  # they are not counted apart
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def stream(reply: ClientReply, pending: ResponsesCall) -> Iterator[str]:
    """The same as server-sent events, piece by piece."""
    response = write(reply, pending)
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events: list[tuple[str, dict[str, Any]]] = [("created", {"response": begun}), ("in_progress", {"response": begun})]
    for index, item in enumerate(response["output"]):
        events += _item_events(item, {"item_id": item["id"], "output_index": index})
    events.append((response["status"], {"response": response}))
    for number, (name, values) in enumerate(events):
        event = {"type": f"response.{name}", "sequence_number": number, **values}
        yield f"event: response.{name}\ndata: {json.dumps(event)}\n\n"


def _item_events(item: dict[str, Any], where: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    index = {"output_index": where["output_index"]}
    if item["type"] == "function_call":
        yield "output_item.added", {**index, "item": {**item, "arguments": "", "status": "in_progress"}}
        for text in pieces(item["arguments"]):
            yield "function_call_arguments.delta", {**where, "delta": text}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "function_call_arguments.done", {**where, **done}
    else:
        yield "output_item.added", {**index, "item": {**item, "content": [], "status": "in_progress"}}
        for number, part in enumerate(item["content"]):
            yield from _part_events(part, {**where, "content_index": number})
    yield "output_item.done", {**index, "item": item}


def _part_events(part: dict[str, Any], where: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = part["type"]
    extras = {name: part[name] for name in ("logprobs",) if name in part}
    none: dict[str, list[Any]] = {name: [] for name in extras}
    yield "content_part.added", {**where, "part": {**part, "text": "", **none}}
    for text in pieces(part["text"]):
        yield f"{kind}.delta", {**where, "delta": text, **none}
    yield f"{kind}.done", {**where, "text": part["text"], **extras}
    yield "content_part.done", {**where, "part": part}


def _resolved(body: dict[str, Any], items: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The body with the items that it only names."""
    entries = body.get("input")
    if not isinstance(entries, list):
        return body
    resolved: list[Any] = []
    for number, entry in enumerate(entries):
        if isinstance(entry, dict) and entry.get("type") == "item_reference":
            name = str(entry.get("id"))
            if name not in items:
                text = f"input.{number}: no item {name[:80]!r} is kept in this session"
                raise Refused(text, code="item_not_found")
            entry = items[name]
        resolved.append(entry)
    return {**body, "input": resolved}


def _check_types(body: dict[str, Any]) -> None:
    """Name what is not served: a type says more than that it is not one of a list."""
    for name, served in (("tools", ("function",)), ("input", ITEMS)):
        entries = body.get(name)
        for entry in entries if isinstance(entries, list) else ():
            kind = entry.get("type", served[0]) if isinstance(entry, dict) else None
            if isinstance(kind, str) and kind not in served:
                raise Refused(f"{name}: {kind[:80]!r} is not served here, only {', '.join(served)}")


def _messages(items: list[_Item]) -> list[Message]:
    """Messages of items: what the assistant said and the calls that follow it are one, and so are calls of one response
    between which a client has put their results."""
    messages: list[Message] = []
    places: dict[str, int] = {}
    for number, item in enumerate(items):
        where = f"input.{number}"
        if item.type == "function_call":
            before = items[number - 1].type if messages else "reasoning"
            follows = before in ("message", "function_call") and messages[-1].role is Role.ASSISTANT
            response = (item.id or "").rpartition("_")[0]
            index = places.get(response, len(messages) - 1 if follows else len(messages))
            if index == len(messages):
                messages.append(Message(Role.ASSISTANT, ""))
            earlier = messages[index]
            messages[index] = Message(Role.ASSISTANT, earlier.content, (*earlier.tool_calls, _call(item, where)))
            if response.startswith("fc_"):
                places[response] = index
        elif item.type == "function_call_output":
            if item.call_id is None:
                raise Refused(f"{where}: a function_call_output has a call_id", code="invalid_message")
            messages.append(Message(Role.TOOL, _content(item.output, where), tool_call_id=item.call_id))
        elif item.type == "message":
            if item.role is None:
                raise Refused(f"{where}: a message has a role", code="invalid_message")
            role = Role.SYSTEM if item.role == "developer" else Role(item.role)
            messages.append(Message(role, _content(item.content, where)))
    return messages


def _call(item: _Item, where: str) -> ToolCall:
    if item.call_id is None or item.name is None:
        raise Refused(f"{where}: a function_call has a call_id and a name", code="invalid_message")
    return read_call(item.call_id, item.name, item.arguments, where)


def _content(content: "str | list[_Part] | list[_Thought]", where: str) -> str | tuple[Part, ...]:
    if isinstance(content, str):
        return content
    parts: list[Part] = []
    for part in content:
        if isinstance(part, _Thought):
            raise Refused(f"{where}: a message has no {part.type}", code="invalid_message")
        if part.type != "input_image":
            parts.append(Text(part.text))
        elif part.image_url is None:
            raise Refused(f"{where}: an input_image has no image_url", code="invalid_image")
        else:
            parts.append(image_of(part.image_url))
    return content_of(parts)


def _schema(tool: _Tool) -> JsonSchema:
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"strict", "type"})}


def output_items(reply: ClientReply, pending: ResponsesCall) -> list[dict[str, Any]]:
    """What the policy wrote: its thoughts, its words and its calls, each named after the response."""
    name, status = pending.id.removeprefix("resp_"), "incomplete" if reply.finish is Finish.LENGTH else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [thought], "status": status})
    if reply.text or not reply.calls:
        tokens: list[dict[str, Any]] = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in reply.tokens
        ]
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": tokens}
        items.append({"id": f"msg_{name}", "type": "message", "role": "assistant", "content": [part], "status": status})
    for number, call in enumerate(reply.calls):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        entry = {"call_id": call.id, "name": call.name, "arguments": arguments, "status": status}
        items.append({"id": f"fc_{name}_{number}", "type": "function_call", **entry})
    return items
