"""The chat endpoint client against a real HTTP server that is slow, wrong, busy or gone."""

import asyncio
import contextlib
import datetime
import email.utils
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from turnwise.engines.samplers.endpoint import ChatEndpoint, EndpointReply
from turnwise.errors import ConfigError, EngineError, EpisodeError
from turnwise.types import FinishReason

USAGE = {"prompt_tokens": 7, "completion_tokens": 3}
MODELS = {"data": [{"id": "tiny"}]}


def chat(message: dict[str, Any], finish: Any = "stop", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "choices": [{"message": message, "finish_reason": finish}], "usage": USAGE} | more


def response(body: Any, status: int = 200, headers: str = "") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
    return head.encode() + content


DROP = b""
HANG = b"hang"
DRIP = b"drip"
HELLO = response(chat({"role": "assistant", "content": "hello"}))


@dataclass
class Server:
    """Answers each request with the next of `answers`; the last repeats."""

    answers: list[bytes]
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                headers = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((line.decode().split()[1], headers, json.loads(content) if content else None))
                self.open_now += 1
                self.most_open = max(self.most_open, self.open_now)
                await asyncio.sleep(0.005)
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                self.open_now -= 1
                if not await self.answer(answer, writer):
                    break
        writer.close()

    async def answer(self, answer: bytes, writer: asyncio.StreamWriter) -> bool:
        if answer is HANG:
            await asyncio.sleep(3600)
        if answer is DRIP:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.write(answer)
        await writer.drain()
        return answer is not DROP


@contextlib.asynccontextmanager
async def serving(*answers: bytes) -> AsyncIterator[Server]:
    server = Server(list(answers))
    handlers: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await server.handle(reader, writer)
        writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    try:
        yield server
    finally:
        listening.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def ask(endpoint: ChatEndpoint, text: str = "hi", **options: Any) -> EndpointReply:
    tools = options.pop("tools", [])
    settings: dict[str, Any] = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": [], "seed": None} | options
    return await endpoint.complete([{"role": "user", "content": text}], tools, **settings)


def run(work: Callable[[Server, ChatEndpoint], Awaitable[Any]], *answers: bytes, **options: Any) -> Any:
    """Do `work` with a server giving these answers and a client with these options."""

    async def main() -> Any:
        async with serving(*answers) as server:
            settings: dict[str, Any] = {"model": "tiny", "timeout": 30.0, "retries": 2, "backoff": 0.001} | options
            endpoint = ChatEndpoint(server.url, **settings)
            try:
                return await work(server, endpoint)
            finally:
                await endpoint.close()

    return asyncio.run(main())


def test_a_request_and_its_reply() -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        tool = {"type": "function", "function": {"name": "f"}}
        reply = await ask(endpoint, "hé \ud800", tools=[tool], stop=["\n"], seed=4)
        assert reply == EndpointReply("hello", [], FinishReason.STOP, 7, 3, "tiny")
        path, headers, body = server.requests[0]
        assert path == "/v1/chat/completions" and headers["authorization"] == "Bearer secret"
        assert body["messages"] == [{"role": "user", "content": "hé \ud800"}]
        assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("tiny", 5, 0.5, 0.9)
        assert (body["tools"], body["stop"], body["seed"]) == ([tool], ["\n"], 4)
        await ask(endpoint)
        assert not {"tools", "stop", "seed"} & set(server.requests[1][2])

    run(work, HELLO, api_key="secret")


def test_tool_calls_and_null_content() -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1'}},
        {"id": None, "function": {"name": "g", "arguments": {"y": 2}}},
        {"function": {"name": "h", "arguments": None}},
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"}

    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        reply = await ask(endpoint)
        assert (reply.text, reply.reasoning, reply.finish_reason) == ("", "hm", FinishReason.STOP)
        assert reply.tool_calls == [("a", "f", '{"x": 1'), ("call_1", "g", '{"y": 2}'), ("call_2", "h", "")]
        assert (await ask(endpoint)).finish_reason is FinishReason.LENGTH

    run(work, response(chat(message, "tool_calls")), response(chat({"content": "cut"}, "length")))


@pytest.mark.parametrize("trouble", [response(b"oops", 500), response(b"", 503), response(b"slow down", 429), DROP])
def test_passing_trouble_is_tried_again(trouble: bytes) -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        assert (await ask(endpoint)).text == "hello"
        assert len(server.requests) == 3

    run(work, trouble, trouble, HELLO)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (response(b"x" * 1000, 500), "answered 500: " + "x" * 300),
        (response(b"busy", 429), "answered 429: busy"),
        (DROP, "RemoteProtocolError"),
        (b"not http at all\r\n\r\n", "RemoteProtocolError"),
    ],
)
def test_lasting_trouble_ends_the_episode(trouble: bytes, said: str) -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        with pytest.raises(EpisodeError, match=said) as caught:
            await ask(endpoint)
        assert "(3 tries)" in str(caught.value) and "x" * 301 not in str(caught.value)
        assert len(server.requests) == 3

    run(work, trouble)


@pytest.mark.parametrize("answer", [HANG, DRIP, HELLO[:-2]])
def test_a_slow_server_is_given_up(answer: bytes) -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        with pytest.raises(EpisodeError, match=r"did not answer in 0\.2 s \(2 tries\)"):
            await ask(endpoint)

    run(work, answer, timeout=0.2, retries=1)


def test_a_slow_server_may_recover() -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        assert (await ask(endpoint)).text == "hello"

    run(work, HANG, HELLO, timeout=0.5, retries=20)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_request_is_not_repeated(status: int) -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        with pytest.raises(EpisodeError, match=f"answered {status}: context too long"):
            await ask(endpoint)
        assert len(server.requests) == 1

    run(work, response(b"context too long", status))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (response(b"bad key", 401), "answered 401: bad key"),
        (response(b"", 403), "answered 403"),
        (response(b"no model", 404), "answered 404: no model"),
        (response(b"", 307, "Location: http://elsewhere/\r\n"), "redirects to http://elsewhere/"),
        (response({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}), "does not count tokens"),
    ],
)
def test_a_wrong_endpoint_stops_the_run(answer: bytes, said: str) -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        with pytest.raises(EngineError, match=said) as caught:
            await ask(endpoint)
        assert "secret" not in str(caught.value)
        assert len(server.requests) == 1

    run(work, answer, api_key="secret")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>it works!</html>", "not JSON: <html>it works!"),
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "without"),
        (b"null", "without"),
        ({"error": "overloaded"}, "without 'choices'.*overloaded"),
        ({"choices": []}, "without choices"),
        ({"choices": None}, "without"),
        ({"choices": [{}]}, "without 'message'"),
        (chat({"content": ["parts"]}), "not text"),
        (chat({"content": "x"}, "content_filter"), "content_filter"),
        (chat({"content": "x"}, None), "finish_reason None"),
        (chat({"content": "x"}, ["stop"]), "finish_reason"),
        (chat({"content": "x", "tool_calls": [{"id": "a"}]}), "without 'function'"),
        (chat({"content": "x", "tool_calls": [{"function": {"name": 3}}]}), "without"),
        (chat({"content": "x", "tool_calls": "f()"}), "without"),
    ],
)
def test_an_unreadable_reply_ends_the_episode(body: Any, said: str) -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        with pytest.raises(EpisodeError, match=said):
            await ask(endpoint)
        assert len(server.requests) == 1

    run(work, response(body))


def test_retry_after_is_honoured() -> None:
    past = email.utils.format_datetime(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))

    async def patient(server: Server, endpoint: ChatEndpoint) -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        assert (await ask(endpoint)).text == "hello"
        return loop.time() - start

    assert run(patient, response(b"", 429, "Retry-After: 1\r\n"), HELLO) >= 1.0  # by the clock that the sleep uses
    run(patient, response(b"", 503, f"Retry-After: {past}\r\n"), HELLO)
    run(patient, response(b"", 429, "Retry-After: soon\r\n"), HELLO)

    async def too_long(server: Server, endpoint: ChatEndpoint) -> None:
        with pytest.raises(EpisodeError, match="429"):
            await ask(endpoint)
        assert len(server.requests) == 1

    run(too_long, response(b"", 429, "Retry-After: 86400\r\n"))


def test_no_more_requests_at_once_than_allowed() -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        replies = await asyncio.gather(*(ask(endpoint, str(number)) for number in range(12)))
        assert len(replies) == 12 and server.most_open == 3

    run(work, HELLO, concurrency=3)


def test_cancelling_one_request_leaves_the_others() -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        stuck = asyncio.ensure_future(ask(endpoint))
        while not server.requests:
            await asyncio.sleep(0.001)
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        assert (await ask(endpoint)).text == "hello"

    run(work, HANG, HELLO, concurrency=1)


def test_the_only_model_is_found() -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        assert await endpoint.check() == "tiny"
        assert (await ask(endpoint)).text == "hello"
        assert [path for path, _, _ in server.requests] == ["/v1/models", "/v1/chat/completions"]

    run(work, response(MODELS), HELLO, model=None)


@pytest.mark.parametrize(
    ("answer", "model", "kind", "said"),
    [
        (response({"data": [{"id": "a"}, {"id": "b"}]}), None, ConfigError, r"2 models \(a, b\)"),
        (response({"data": []}), None, ConfigError, r"0 models \(none\)"),
        (response(MODELS), "tinny", ConfigError, "did you mean 'tiny'"),
        (response({"models": []}), None, EngineError, "does not list models"),
        (response(b"<html>"), None, EngineError, "not JSON"),
        (response(b"", 404), None, EngineError, "404"),
        (response(b"down", 502), None, EngineError, "502: down"),
        (DROP, None, EngineError, "cannot be used"),
    ],
)
def test_a_check_that_fails_says_why(answer: bytes, model: str | None, kind: type[Exception], said: str) -> None:
    async def work(server: Server, endpoint: ChatEndpoint) -> None:
        with pytest.raises(kind, match=said):
            await endpoint.check()

    run(work, answer, model=model)


def test_nobody_listens() -> None:
    async def main() -> None:
        async with serving(HELLO) as server:
            url = server.url
        endpoint = ChatEndpoint(url, "tiny", retries=1, backoff=0.001)
        with pytest.raises(EngineError, match=r"cannot be used: .*ConnectError"):
            await endpoint.check()
        with pytest.raises(EpisodeError, match="ConnectError"):
            await ask(endpoint)
        await endpoint.close()

    asyncio.run(main())


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x/v1", "http://", "http://x:port/v1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.base_url"):
        ChatEndpoint(url)


def test_a_key_with_a_line_break_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match="line break") as caught:
        ChatEndpoint("http://127.0.0.1:1/v1", api_key="abc\n")
    assert "abc" not in str(caught.value)
