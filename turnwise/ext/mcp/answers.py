"""What an MCP server says, read: results as the model sees them, and answers that no client can read."""

import base64
import binascii
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from turnwise.errors import ToolError
from turnwise.system.image_bytes import data_url
from turnwise.types import Image, ToolResult

if TYPE_CHECKING:
    import mcp.types

MOST_IMAGES = 8
MOST_IMAGE_BYTES = 10_000_000
MOST_STRUCTURED_CHARS = 20_000
"""Of a result's structured content that is kept on the record."""
UNREADABLE = -32700
"""JSON-RPC's code for what cannot be parsed."""
SEARCHED_CHARACTERS = 400
"""Characters at either end of an answer in which its number is looked for: what lies between is the server's."""
_NUMBER = re.compile(r'"id"\s*:\s*(?:(\d{1,18})|"([^"\\]{0,80})")')


def first_problem(error: ValidationError) -> str:
    """Where and what is wrong first, on one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(step) for step in first["loc"])
    return f"{where}: {first['msg']}"[:300] if where else first["msg"][:300]


class Incoming:
    """What comes from a server: an answer that cannot be read is made an error for who asked. He would wait in vain
    otherwise, and each would be a traceback on the terminal."""

    def __init__(self) -> None:
        self.has_ended = False
        """Whether the connection is closed from the other side."""
        self._stream: Any = None

    @contextlib.asynccontextmanager
    async def of(self, transport: Any) -> AsyncIterator[tuple[Any, Any]]:
        """The transport, with this in the place of what it brings in."""
        for name in ("mcp", "client"):  # the loggers of the package
            if not logging.getLogger(name).handlers:
                logging.getLogger(name).addHandler(logging.NullHandler())
        async with transport as (self._stream, outgoing):
            yield self, outgoing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.has_ended = True
        await self._stream.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return _or_error(await self._stream.__anext__())

    async def receive(self) -> Any:
        """The next message of the server; one that cannot be read becomes an error with its number."""
        return _or_error(await self._stream.receive())


def _or_error(item: Any) -> Any:
    """The message, or an error in its place that carries its number; what has none is no answer, such as a print."""
    if not isinstance(item, ValidationError):
        return item
    from mcp.shared.message import SessionMessage
    from mcp.types import ErrorData, JSONRPCError

    inputs = [entry["input"] for entry in item.errors(include_url=False, include_context=False)]
    number = next((candidate for value in inputs if (candidate := _number(value)) is not None), None)
    if number is None:
        return item
    problem = ErrorData(code=UNREADABLE, message=f"its answer cannot be read: {first_problem(item)}")
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=number, error=problem))


def _number(value: Any) -> int | str | None:
    """That of the question which an answer, parsed or not, is for."""
    if isinstance(value, dict):
        identifier = value.get("id")
        return identifier if isinstance(identifier, int | str) else None
    text = value.decode(errors="replace") if isinstance(value, bytes) else value if isinstance(value, str) else ""
    ends = (text[:SEARCHED_CHARACTERS], text[-SEARCHED_CHARACTERS:])
    if not text.lstrip().startswith("{") or not any('"jsonrpc"' in end for end in ends):
        return None  # a print of the server's
    named = _NUMBER.search(ends[0]) or _NUMBER.search(ends[1])
    return None if named is None else int(named[1]) if named[1] else named[2]


def read_result(result: "mcp.types.CallToolResult", facts: dict[str, Any]) -> ToolResult:
    """What the model reads of a result, and its images; an error of the tool's is a ToolError."""
    texts: list[str] = []
    images: list[Image] = []
    for block in result.content:
        match block.type:
            case "text":
                texts.append(block.text)
            case "image":
                images.append(_image(block.data))
            case "resource" if hasattr(block.resource, "text"):
                texts.append(block.resource.text)
            case "resource_link":
                texts.append(f"[{block.name}: {block.uri}]")
            case other:
                texts.append(f"[{other} left out]")
    text = "\n".join(texts)
    if result.is_error:
        raise ToolError(text or "the tool failed and did not say why")
    if len(images) > MOST_IMAGES:
        raise ToolError(f"the tool returned {len(images)} images; at most {MOST_IMAGES} are taken")
    if result.structured_content is not None:
        structured = json.dumps(result.structured_content, ensure_ascii=False)
        if len(structured) <= MOST_STRUCTURED_CHARS:
            facts = {**facts, "structured": result.structured_content}
        if not texts:
            text = structured
    return ToolResult(text, tuple(images), info=facts)


def _image(data: str) -> Image:
    if len(data) > MOST_IMAGE_BYTES * 4 // 3:
        raise ToolError(f"the tool returned an image of more than {MOST_IMAGE_BYTES} bytes")
    try:
        url = data_url(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError) as error:
        raise ToolError(f"the tool returned an image that is not base64: {error}") from error
    if url is None:
        raise ToolError("the tool returned an image of an unknown kind")
    return Image(url)
