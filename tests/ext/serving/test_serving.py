"""The endpoint with the real OpenAI client: plain and streamed, tools, seeds, keys, many at once, hostile bodies."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from turnwise.config import Config
from turnwise.data.task_config import configure
from turnwise.engines.rendering import make_renderer
from turnwise.engines.samplers.request import Request
from turnwise.engines.samplers.sampler import Sampler
from turnwise.engines.samplers.scripted import ScriptRequest, scripted_sampler
from turnwise.ext.serving.app import INTAKE, make_app
from turnwise.ext.serving.policy import ServedPolicy
from turnwise.rollout.placement import placement_of
from turnwise.system.serving import serving_beside
from turnwise.types import Completion, ToolCall

HOST = "127.0.0.1"
USER = {"role": "user", "content": "What is 6 times 7?"}
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def config() -> Config:
    return configure("task=null", "sampling.max_tokens=24", "engine.threads=1")


def calling(request: ScriptRequest) -> str:
    """Calls the tool, and reads its result out; without a question mark it only speaks."""
    if "tool_response" in request.text.rpartition("<|im_start|>user")[2]:
        return "#### 42"
    if "times" in request.text:
        return request.call_format.render_call(ToolCall("", "calculate", {"expression": "6*7"}))
    return "It is said, and done."


@contextlib.asynccontextmanager
async def served(key: str | None = None, wrap: Callable[[Sampler], Sampler] | None = None) -> AsyncIterator[str]:
    """A policy that a script speaks for; the address of its endpoint."""
    renderer = make_renderer(config())
    sampler: Sampler = scripted_sampler(renderer, calling)
    sampler.context_length = 4096
    policy = ServedPolicy("first", config(), renderer, sampler if wrap is None else wrap(sampler))
    async with serving_beside(make_app(policy, HOST, key), HOST) as port:
        yield f"http://{HOST}:{port}/v1"


def client(base_url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)


def with_client(use: Callable[[openai.AsyncOpenAI], Awaitable[Any]], **how: Any) -> Any:
    async def run() -> Any:
        async with served(**how) as base_url, client(base_url) as api:
            return await use(api)

    return asyncio.run(run())


def test_a_tool_is_called_and_its_result_read():
    async def use(api: openai.AsyncOpenAI) -> None:
        assert [model.id for model in (await api.models.list()).data] == ["first"]
        assert (await api.models.retrieve("first")).owned_by == "turnwise"
        asked = {"model": "first", "tools": [CALCULATE]}
        answer = await api.chat.completions.create(messages=[USER], **asked)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "calculate" and json.loads(call.function.arguments) == {"expression": "6*7"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        answer = await api.chat.completions.create(messages=[USER, choice.message, result], **asked)
        assert answer.choices[0].message.content == "#### 42" and answer.choices[0].finish_reason == "stop"
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > usage.completion_tokens > 0

    with_client(use)


def test_a_stream_says_the_same():
    async def use(api: openai.AsyncOpenAI) -> None:
        asked = {"model": "first", "stream": True, "stream_options": {"include_usage": True}}
        plain = {"role": "user", "content": "Say something."}
        chunks = [chunk async for chunk in await api.chat.completions.create(messages=[plain], **asked)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "It is said, and done." and chunks[-1].usage.completion_tokens > 0
        stream = await api.chat.completions.create(messages=[USER], tools=[CALCULATE], **asked)
        calls = [call async for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or []]
        assert calls[0].function.name == "calculate"
        assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"expression": "6*7"}

    with_client(use)


def test_limits_and_stops_of_the_request_hold():
    async def use(api: openai.AsyncOpenAI) -> None:
        plain = {"role": "user", "content": "Say something."}
        create = api.chat.completions.create
        short = await create(model="first", messages=[plain], max_tokens=3)
        assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 3
        stopped = await create(model="first", messages=[plain], stop=[","])
        assert stopped.choices[0].message.content == "It is said" and stopped.choices[0].finish_reason == "stop"
        text = await create(model="first", messages=[USER], tools=[CALCULATE], tool_choice="none")
        assert not text.choices[0].message.tool_calls and "calculate" in text.choices[0].message.content

    with_client(use)


class TogetherOnly:
    """Writes nothing before so many turns are asked for: whoever serves one after the other waits for ever."""

    def __init__(self, inner: Sampler, count: int) -> None:
        self._inner, self._waiting, self._all = inner, count, asyncio.Event()
        self.context_length, self.capabilities = inner.context_length, inner.capabilities

    async def generate(self, request: Request) -> Completion:
        self._waiting -= 1
        if not self._waiting:
            self._all.set()
        await self._all.wait()
        return await self._inner.generate(request)

    async def release(self, conversation: str) -> None:
        await self._inner.release(conversation)


def test_requests_reach_the_sampler_together():
    async def use(api: openai.AsyncOpenAI) -> None:
        asked = [api.chat.completions.create(model="first", messages=[USER]) for _ in range(16)]
        assert len(await asyncio.gather(*asked)) == 16

    with_client(use, wrap=lambda sampler: TogetherOnly(sampler, 16))  # type: ignore[arg-type,return-value]


def test_the_bundled_model_is_sampled_as_asked():
    """Our own sampler: a seed draws the same again, temperature 0 needs none, and log-probs are of the tokens."""

    async def run() -> None:
        chosen = config()
        renderer = make_renderer(chosen)
        async with placement_of(chosen).open_sampler(renderer, lambda text: None) as sampler:
            app = make_app(ServedPolicy("tiny", chosen, renderer, sampler), HOST, None)
            async with serving_beside(app, HOST) as port, client(f"http://{HOST}:{port}/v1") as api:

                async def say(**more: Any) -> Any:
                    question = {"role": "user", "content": "Ada has 3 eggs and finds 4 more. How many eggs are there?"}
                    return await api.chat.completions.create(model="tiny", messages=[question], **more)

                drawn = await asyncio.gather(*(say(seed=seed, temperature=1.5) for seed in (1, 1, 2, 3)))
                texts = [answer.choices[0].message.content for answer in drawn]
                assert texts[0] == texts[1] and len(set(texts)) > 1
                greedy = [await say(temperature=0), await say(temperature=0, logprobs=True)]
                assert greedy[0].choices[0].message == greedy[1].choices[0].message
                told = greedy[1].choices[0].logprobs.content
                assert len(told) == greedy[1].usage.completion_tokens and all(token.logprob <= 0 for token in told)

    asyncio.run(run())


def test_a_key_is_demanded():
    async def run() -> None:
        async with served(key="secret") as base_url:
            for key in ("wrong", "secre", "secret2"):
                async with client(base_url, key) as api:
                    with pytest.raises(openai.AuthenticationError, match="needs its token"):
                        await api.models.list()
            async with client(base_url, "secret") as api:
                answer = await api.chat.completions.create(model="first", messages=[USER])
                assert answer.choices[0].message.tool_calls

    asyncio.run(run())


def body(**other: Any) -> bytes:
    return json.dumps({"model": "first", "messages": [USER], **other}).encode()


@pytest.mark.parametrize(
    ("content", "status", "problem"),
    [
        (b'{"a": [' + b"[]," * INTAKE.values + b"[]]}", 413, "values"),
        (b"nonsense", 400, "the body is not JSON"),
        (b"[1]", 400, "not a JSON object"),
        (b"[" * 5000 + b"]" * 5000, 400, "not JSON"),
        (body(model="gpt-4o"), 404, "there is no model 'gpt-4o' here, only 'first'"),
        (body(messages="hello"), 400, "messages: Input should be a valid list"),
        (body(messages=[]), 400, "messages: "),
        (body(messages=[{"role": "wizard", "content": "a"}]), 400, "messages.0.role"),
        (body(messages=[{**USER, "content": 3}]), 400, "messages.0.content"),
        (body(messages=[{"role": "tool", "content": "42"}]), 400, "a tool message has a tool_call_id"),
        (body(messages=[{**USER, "content": "word " * 20_000}]), 400, "leave no room for an answer"),
        (body(messages=[{**USER, "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]), 400,
         "data URL or a web address"),
        (body(messages=[{**USER, "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]), 400,
         "reads text only"),
        (body(mystery=1), 400, "mystery: this parameter is not supported here"),
        (body(frequency_penalty=0.5), 400, "frequency_penalty: this parameter is not supported here"),
        (body(temperature="hot"), 400, "temperature: Input should be a valid number"),
        (body(temperature=-1), 400, "temperature: "),
        (body(top_p=0), 400, "top_p: "),
        (body(max_tokens=0), 400, "max_tokens: "),
        (body(seed=2**70), 400, "seed: "),
        (body(n=2), 400, "n: "),
        (body(stop=["a"] * 17), 400, "stop: at most 16 strings"),
        (body(tools=[CALCULATE], tool_choice="required"), 400, "tool_choice: the policy chooses itself"),
        (body(tools=[{"type": "function", "function": {"name": "f", "parameters": 3}}]), 400, "tools.0.function.parameters"),
        (body(response_format={"type": "json_object"}), 400, "response_format.type"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_clear_words(content, status, problem):
    async def run() -> tuple[int, str, int]:
        async with served() as base_url, httpx.AsyncClient(trust_env=False, timeout=60) as http:
            headers = {"content-type": "application/json"}
            answer = await http.post(f"{base_url}/chat/completions", content=content, headers=headers)
            after = await http.post(f"{base_url}/chat/completions", content=body(), headers=headers)
            return answer.status_code, answer.text, after.status_code

    refused, text, after = asyncio.run(run())
    assert (refused, after) == (status, 200), text
    assert problem in json.loads(text)["error"]["message"]


def test_a_body_that_is_too_large_is_refused_before_it_comes():
    async def run() -> bytes:
        async with served() as base_url:
            host, port = base_url.removeprefix("http://").removesuffix("/v1").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {INTAKE.body + 1}\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            return answer

    answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 413") and f"a request has at most {INTAKE.body} bytes".encode() in answer


def test_other_places_hosts_and_kinds_are_refused():
    async def run() -> None:
        async with served() as base_url, httpx.AsyncClient(trust_env=False) as http:
            url = f"{base_url}/chat/completions"
            assert (await http.get(f"{base_url}/embeddings")).status_code == 404
            assert (await http.post(url, content=body(), headers={"content-type": "text/plain"})).status_code == 415
            json_elsewhere = {"content-type": "application/json", "host": "elsewhere.example"}
            assert (await http.post(url, content=body(), headers=json_elsewhere)).status_code == 400
            assert (await http.get(base_url.replace("/v1", "/health"))).json() == {"status": "ok"}

    asyncio.run(run())


def test_an_engine_that_fails_is_a_server_error():
    class Broken(TogetherOnly):
        async def generate(self, request: Request) -> Completion:
            from turnwise.errors import EngineError

            raise EngineError("the model's logits are NaN")

    async def use(api: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError, match="the model cannot speak: the model's logits are NaN"):
            await api.chat.completions.create(model="first", messages=[USER])

    with_client(use, wrap=lambda sampler: Broken(sampler, 1))  # type: ignore[arg-type,return-value]
