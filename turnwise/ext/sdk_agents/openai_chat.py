"""OpenAI's chat completions: requests into calls, replies into completions, and their errors."""

import json
import time
from collections.abc import Iterator, Sequence
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
from turnwise.types import JsonSchema, Message, Part, Role, Text, ToolCall

SAID_OTHERWISE = {"function_call", "audio", "images", "prefix", "partial"}
"""Names in a message that hold words or images of it which nobody here would read."""
FINISH = {
    Finish.STOP: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.TOOL_CALLS: "tool_calls",
}


class _ImageUrl(Border):
    url: str
    detail: Literal["auto"] = "auto"


class _Part(Border):
    ignores = OF_ANY_PART
    type: Literal["text", "image_url"]
    text: str = ""
    image_url: _ImageUrl | None = None


class _Function(Border):
    name: str
    arguments: str = "{}"


class _ToolCall(Border):
    ignores = OF_ANY_PART | {"extra_content"}
    id: str
    type: Literal["function"] = "function"
    index: int = 0
    """Of a streamed call."""
    function: _Function


class _Message(Border):
    ignores = OF_ANY_PART | {"id"}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] = ""
    name: str | None = None
    tool_calls: list[_ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """As we sent it; what was thought is known from the record."""

    @classmethod
    def unread(cls, data: dict[str, Any]) -> frozenset[str]:
        """Of the policy's own messages all that is not their words: the record has them."""
        if data.get("role") != "assistant":
            return super().unread(data)
        return frozenset(data.keys() - cls.model_fields.keys() - SAID_OTHERWISE)


class _FunctionSchema(Border):
    ignores = OF_ANY_PART
    name: str
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False


class _Tool(Border):
    ignores = OF_ANY_PART
    type: Literal["function"]
    function: _FunctionSchema


class _StreamOptions(Border):
    include_usage: bool = False
    include_obfuscation: bool = False


class _TextFormat(Border):
    type: Literal["text"]


class ChatRequest(Border):
    """The fields of a chat completion request that are read."""

    ignores = frozenset(
        {"store", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata"}
        | {"service_tier", "reasoning_effort", "verbosity", "reasoning", "seed", "frequency_penalty", "moderation"}
        | {"presence_penalty", "repetition_penalty", "prediction", "caching", "prompt_cache_options"}
    )
    model: str
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] = Field(default_factory=list)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: _StreamOptions = Field(default_factory=_StreamOptions)
    logprobs: bool = False
    top_logprobs: Literal[0] = 0
    # What changes nothing here, with the values for which that is so.
    n: Literal[1] = 1
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: _TextFormat | None = None


def read(body: dict[str, Any]) -> tuple[Call, ChatRequest]:
    """The call of a request, and the request for how it wants its reply."""
    with noting() as notes:
        request = validated(ChatRequest, body)
        note_other("tool_choice", request.tool_choice, "none" if request.tool_choice == "none" else "auto")
        note_other("parallel_tool_calls", request.parallel_tool_calls, True)
    return call_of(request, notes), request


def call_of(request: ChatRequest, ignored: Sequence[str] = ()) -> Call:
    """What a request asks; `ignored` is what it does not get."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
    return Call(
        model=request.model,
        messages=tuple(_message(entry) for entry in request.messages),
        tools=tuple(_schema(tool) for tool in request.tools),
        strict=frozenset(tool.function.name for tool in request.tools if tool.function.strict),
        max_tokens=min(limits, default=None),
        temperature=request.temperature,
        top_p=request.top_p,
        stop=tuple(text for text in stop if text),
        logprobs=request.logprobs,
        hides_calls=request.tool_choice == "none",
        ignored=tuple(ignored),
    )


def write(reply: ClientReply, request: ChatRequest) -> dict[str, Any]:
    """The reply as a completion object of the OpenAI chat API."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None, "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_call_entry(call) for call in reply.calls]
    elif not reply.text:
        message["content"] = ""
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(reply, request),
        "finish_reason": FINISH[reply.finish],
    }
    return {**_head(request, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def stream(reply: ClientReply, request: ChatRequest) -> Iterator[str]:
    """The same as server-sent events, piece by piece."""
    head = _head(request, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return _event({**head, "choices": [choice]})

    yield chunk({"role": "assistant", "content": ""}, logprobs=_logprobs(reply, request))
    for text in pieces(reply.reasoning or ""):
        yield chunk({"reasoning_content": text})
    for text in pieces(reply.text):
        yield chunk({"content": text})
    for index, call in enumerate(reply.calls):
        entry = _call_entry(call)
        arguments = entry["function"].pop("arguments")
        yield chunk({"tool_calls": [{"index": index, **entry, "function": {**entry["function"], "arguments": ""}}]})
        for text in pieces(arguments):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    yield chunk({}, FINISH[reply.finish])
    if request.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def model_entry(name: str) -> dict[str, Any]:
    """A model as the API lists it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "turnwise"}


def write_error(refused: Refused) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": refused.text, "type": kind, "param": None, "code": refused.code}}


def _message(entry: _Message) -> Message:
    role = Role.SYSTEM if entry.role == "developer" else Role(entry.role)
    if role is Role.TOOL and entry.tool_call_id is None:
        raise Refused("messages: a tool message has a tool_call_id", code="invalid_message")
    calls = tuple(
        read_call(call.id, call.function.name, call.function.arguments, "messages") for call in entry.tool_calls
    )
    if calls and role is not Role.ASSISTANT:
        raise Refused(f"messages: a {role} message has no tool_calls", code="invalid_message")
    return Message(role, _content(entry.content), calls, tool_call_id=entry.tool_call_id, name=entry.name)


def _content(content: str | list[_Part]) -> str | tuple[Part, ...]:
    if isinstance(content, str):
        return content
    parts: list[Part] = []
    for part in content:
        if part.type == "image_url":
            if part.image_url is None:
                raise Refused("messages: an image_url part has no image_url", code="invalid_image")
            parts.append(image_of(part.image_url.url))
        else:
            parts.append(Text(part.text))
    return content_of(parts)


def _schema(tool: _Tool) -> JsonSchema:
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    return {"type": "function", "function": function}


def _call_entry(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _logprobs(reply: ClientReply, request: ChatRequest) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    content: list[dict[str, Any]] = [
        {"token": text, "logprob": value, "bytes": None, "top_logprobs": []} for text, value in reply.tokens
    ]
    return {"content": content, "refusal": None}


def _usage(reply: ClientReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _head(request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": request.model}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
