"""The rule judge over HTTP, and one that fails in every way a server can."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from rule_judge import ChatRequest, completion, make_app

from turnwise.ext.judge.settings import JudgeSettings

GOOD, DROP, HANG, GARBAGE, EMPTY = "good", "drop", "hang", "garbage", "empty"


def answer(body: Any, status: int = 200, headers: str = "") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{headers}\r\n".encode() + content


def says(text: str | None, finish: str = "stop") -> bytes:
    return answer({"choices": [{"message": {"content": text}, "finish_reason": finish}]})


@dataclass
class Unreliable:
    """A rule judge whose replies `plan(number, request)` may spoil: a status, a word above, bytes to send, or GOOD."""

    plan: Callable[[int, Any], Any] = lambda number, request: GOOD
    model: str = "rule-judge"
    seconds: float = 0.0
    url: str = ""
    requests: list[Any] = field(default_factory=list)
    lists: int = 0
    open_now: int = 0
    most_open: int = 0
    gate: asyncio.Event | None = None

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            length = 0
            while (header := (await reader.readline()).decode().strip().lower()) != "":
                if header.startswith("content-length:"):
                    length = int(header.split(":")[1])
            request = json.loads(await reader.readexactly(length)) if length else None
            if request is None and line.split()[1].endswith(b"/models"):
                self.lists += 1
                reply: Any = self.plan(-1, None)
                reply = answer({"data": [{"id": self.model}]}) if reply == GOOD else reply
            else:
                reply = await self.chat(request)
            if reply is None:
                return
            writer.write(answer({"error": "spoilt"}, reply) if isinstance(reply, int) else reply)
            await writer.drain()

    async def chat(self, request: Any) -> Any:
        number = len(self.requests)
        self.requests.append(request)
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(self.seconds)
            reply = self.plan(number, request)
            if reply == HANG:
                await asyncio.sleep(3600)
        finally:
            self.open_now -= 1
        if reply == DROP:
            return None
        if reply == GARBAGE:
            return answer(b"<html>oops")
        if reply == EMPTY:
            return answer({"choices": []})
        return answer(completion(ChatRequest(**request))) if reply == GOOD else reply


@contextlib.asynccontextmanager
async def unreliable(plan: Callable[[int, Any], Any] | None = None, **more: Any) -> AsyncIterator[Unreliable]:
    server = Unreliable(**more) if plan is None else Unreliable(plan, **more)
    tasks: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            await server.handle(reader, writer)
        writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    try:
        yield server
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def real_server(model: str = "rule-judge") -> AsyncIterator[str]:
    """The rule judge as it is served, in this event loop."""
    server = uvicorn.Server(uvicorn.Config(make_app(model), port=0, log_level="critical", ws="none"))
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        assert not serving.done()
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await serving


def settings(*urls: str, **more: Any) -> JudgeSettings:
    return JudgeSettings.of({"base_urls": urls, "backoff": 0.001, "timeout": 20.0, "breaker_failures": 1000} | more)
