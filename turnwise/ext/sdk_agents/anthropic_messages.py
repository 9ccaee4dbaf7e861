"""Anthropic's messages: requests into calls, replies into messages of blocks, and their errors."""

import json
from collections.abc import Iterator
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
    validated,
)
from turnwise.types import JsonSchema, Message, Part, Role, Text, ToolCall

FINISH = {
    Finish.STOP: "end_turn",
    Finish.STOP_STRING: "stop_sequence",
    Finish.LENGTH: "max_tokens",
    Finish.TOOL_CALLS: "tool_use",
}
ERRORS = {404: "not_found_error"}


class _Source(Border):
    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""


class _ResultBlock(Border):
    """A text or image block inside a tool's result."""

    ignores = OF_ANY_PART
    type: Literal["text", "image"]
    text: str = ""
    source: _Source | None = None


class _Block(_ResultBlock):
    ignores = OF_ANY_PART | {"caller"}
    type: Literal["text", "image", "tool_use", "tool_result", "thinking"]  # type: ignore[assignment]
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: str | list[_ResultBlock] = ""
    is_error: bool = False
    thinking: str = ""
    """As we sent it; what was thought is known from the record."""
    signature: str = ""


class _Message(Border):
    role: Literal["user", "assistant"]
    content: str | list[_Block] = ""


class _Tool(Border):
    ignores = OF_ANY_PART | {"defer_loading", "eager_input_streaming", "allowed_callers", "input_examples"}
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    strict: bool = False


class _ToolChoice(Border):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Thinking(Border):
    ignores = frozenset({"budget_tokens", "display"})
    type: Literal["disabled", "adaptive", "enabled"]


class _OutputConfig(Border):
    ignores = frozenset({"effort", "task_budget"})


class MessagesRequest(Border):
    """The body of a request. A parameter that is not here, or has another value than these, is refused."""

    ignores = frozenset(
        {"metadata", "cache_control", "service_tier", "context_management", "betas", "inference_geo"}
        | {"speed", "diagnostics"}
    )
    model: str
    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    system: str | list[_ResultBlock] = ""
    tools: list[_Tool] = Field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    thinking: _Thinking = _Thinking(type="disabled")
    """Any but `disabled` shows the thoughts."""
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None
    """A format that answers would be held to is refused."""


def read(body: dict[str, Any]) -> tuple[Call, MessagesRequest]:
    """The call of a request, and the request for how it wants its reply."""
    with noting() as notes:
        request = validated(MessagesRequest, body)
        choice = request.tool_choice or _ToolChoice(type="auto")
        note_other("tool_choice", choice.name or choice.type, "none" if choice.type == "none" else "auto")
        note_other("disable_parallel_tool_use", choice.disable_parallel_tool_use, False)
    system = request.system if isinstance(request.system, str) else _content(request.system)
    messages = [Message(Role.SYSTEM, system)] if system else []
    for entry in request.messages:
        messages += _messages(entry)
    call = Call(
        model=request.model,
        messages=tuple(messages),
        tools=tuple(_schema(tool) for tool in request.tools),
        strict=frozenset(tool.name for tool in request.tools if tool.strict),
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=tuple(text for text in request.stop_sequences if text),
        hides_calls=choice.type == "none",
        ignored=tuple(notes),
    )
    return call, request


def write(reply: ClientReply, request: MessagesRequest) -> dict[str, Any]:
    """The reply as a message object of the Anthropic API."""
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(reply, request),
        "stop_reason": FINISH[reply.finish],
        "stop_sequence": reply.stop_string,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def stream(reply: ClientReply, request: MessagesRequest) -> Iterator[str]:
    """The same as server-sent events, piece by piece."""
    message = write(reply, request)
    blocks: list[dict[str, Any]] = message["content"]
    usage = {**message["usage"], "output_tokens": 0}
    ends = {"stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**message, "content": [], "usage": usage, **ends})
    for index, block in enumerate(blocks):
        empty, deltas = _deltas(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta={name: message[name] for name in ends}, usage=message["usage"])
    yield _event("message_stop")


def write_error(refused: Refused) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    kind = ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refused.text, "code": refused.code}}


def _messages(entry: _Message) -> list[Message]:
    """One message of theirs: tools' results are messages of their own here."""
    if isinstance(entry.content, str):
        return [Message(Role(entry.role), entry.content)]
    kinds = {block.type for block in entry.content}
    if entry.role == "assistant":
        if misplaced := kinds & {"image", "tool_result"}:
            raise Refused(f"messages: an assistant has no {min(misplaced)} block", code="invalid_message")
        text = "".join(block.text for block in entry.content if block.type == "text")
        calls = [ToolCall(block.id, block.name, block.input) for block in entry.content if block.type == "tool_use"]
        return [Message(Role.ASSISTANT, text, tuple(calls))]
    if misplaced := kinds & {"tool_use", "thinking"}:
        raise Refused(f"messages: a user has no {min(misplaced)} block", code="invalid_message")
    results = [_result(block) for block in entry.content if block.type == "tool_result"]
    blocks = [block for block in entry.content if block.type != "tool_result"]
    return [*results, Message(Role.USER, _content(blocks))] if blocks or not results else results


def _result(block: _Block) -> Message:
    if not block.tool_use_id:
        raise Refused("messages: a tool_result has a tool_use_id", code="invalid_message")
    content = block.content if isinstance(block.content, str) else _content(block.content)
    if block.is_error:  # the model reads text: it learns of it in words
        content = f"Error: {content}" if isinstance(content, str) else (Text("Error: "), *content)
    return Message(Role.TOOL, content, tool_call_id=block.tool_use_id)


def _content(blocks: "list[_ResultBlock] | list[_Block]") -> str | tuple[Part, ...]:
    parts: list[Part] = []
    for block in blocks:
        if block.type == "image":
            source = block.source
            if source is None:
                raise Refused("messages: an image block has no source", code="invalid_image")
            url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
            parts.append(image_of(url))
        else:
            parts.append(Text(block.text))
    return content_of(parts)


def _schema(tool: _Tool) -> JsonSchema:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _blocks(reply: ClientReply, request: MessagesRequest) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning is not None and request.thinking.type != "disabled":
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.text or not reply.calls:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
    return blocks


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(how a block begins, what is added to it)."""
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(text)]
    kind = block["type"]
    return {**block, kind: ""}, [{"type": f"{kind}_delta", kind: piece} for piece in pieces(block[kind])]


def _event(kind: str, **values: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **values})}\n\n"
