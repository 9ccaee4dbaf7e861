"""How many agents written against SDKs run at once, what HTTP costs them, and whether anything is left behind.

Plays N episodes at the same time through `sdk_agents.client`: a third each with the OpenAI SDK (async, streaming), the
OpenAI SDK (sync, in a thread) and the Anthropic SDK, every one with a client of its own, a tool call and two turns. The
words come from a script, so that all time is the system's own; no SDK tries again. Once more with clients that share
one set of certificates: an SDK reads them anew for every client, 20 ms that a plain address has no use for; and once by
a bare socket, which leaves what our side costs. The peer is the same conversation in the built-in tool_calling loop,
without HTTP. File descriptors, threads, tasks and sessions are counted before and after.

    python benchmarks/sdk_agents.py [--agents 500]
"""

import argparse
import asyncio
import gc
import json
import os
import resource
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai

from turnwise import configure, tool
from turnwise.engines.samplers.scripted import ScriptRequest
from turnwise.ext.sdk_agents.server import client_server
from turnwise.rollout.episode import RolloutContext, run_episode
from turnwise.rollout.prepare import open_context, prepare
from turnwise.types import Message, Role, Sample, ToolCall, Trajectory

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
QUESTION = "What is twice 21?"
CERTIFICATES = ssl.create_default_context()
SETTLE_SECONDS = 5.0
"""For connections that both sides have closed to be gone."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    files: int
    threads: int
    tasks: int
    sessions: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement."""

    trajectories: list[Trajectory]
    seconds: float
    cpu: float
    before: Held
    after: Held


@tool
def twice(a: int) -> str:
    """Twice a number."""
    return str(2 * a)


def script(request: ScriptRequest) -> str:
    if request.turn:
        return "#### 42"
    return "So: " + request.call_format.render_call(ToolCall("", "twice", {"a": 21}))


async def agent(base_url: str, sample: Sample) -> str | None:
    return await play(base_url, sample, None)


async def frugal_agent(base_url: str, sample: Sample) -> str | None:
    return await play(base_url, sample, CERTIFICATES)


async def bare_agent(base_url: str, sample: Sample) -> str:
    address = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", "function": {"name": "twice", "parameters": SCHEMA}}]
    try:
        while True:
            body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
            head = f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answered = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(answered.partition("content-length:")[2].partition("\r")[0])
            message = json.loads(await reader.readexactly(length))["choices"][0]["message"]
            if not message.get("tool_calls"):
                return str(message["content"])
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in message["tool_calls"]]
            messages += [message, *results]
    finally:
        writer.close()


async def play(base_url: str, sample: Sample, verify: ssl.SSLContext | None) -> str | None:
    kind = int(sample.id.rpartition(":")[2]) % 3
    settings = {"base_url": base_url, "api_key": "none", "max_retries": 0}
    if kind == 1:
        from turnwise.rollout.plugin_calls import in_thread

        plain = verify and openai.DefaultHttpxClient(verify=verify)
        return await in_thread(lambda: synchronous(openai.OpenAI(http_client=plain, **settings)))
    if kind == 0:
        client = verify and openai.DefaultAsyncHttpxClient(verify=verify)
        return await asynchronous(openai.AsyncOpenAI(http_client=client, **settings))
    other = verify and anthropic.DefaultAsyncHttpxClient(verify=verify)
    return await with_anthropic(anthropic.AsyncAnthropic(http_client=other, **settings))


async def asynchronous(client: openai.AsyncOpenAI) -> str | None:
    tools = [{"type": "function", "function": {"name": "twice", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with client:
        while True:
            async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            if not message.tool_calls:
                return message.content
            results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls]
            calls = [{"id": call.id, "type": "function", "function": call.function} for call in message.tool_calls]
            messages += [{"role": "assistant", "content": message.content, "tool_calls": calls}, *results]


def synchronous(client: openai.OpenAI) -> str | None:
    tools = [{"type": "function", "function": {"name": "twice", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client:
        while True:
            message = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
            if not message.tool_calls:
                return message.content
            results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls]
            messages += [message, *results]


async def with_anthropic(client: anthropic.AsyncAnthropic) -> str | None:
    tools = [{"name": "twice", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with client:
        while True:
            answer = await client.messages.create(model="m", max_tokens=99, messages=messages, tools=tools)
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return answer.content[0].text
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "42"} for call in calls]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


def held(sessions: int) -> Held:
    gc.collect()
    pool = "asyncio_"  # the event loop's own, which grows to a bound
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith(pool)]
    return Held(len(os.listdir("/dev/fd")), len(threads), len(asyncio.all_tasks()), sessions)


async def settled(before: Held, sessions: Callable[[], int]) -> Held:
    deadline = time.monotonic() + SETTLE_SECONDS
    while (now := held(sessions())) != before and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return now


async def played(context: RolloutContext, samples: list[Sample]) -> Measured:
    async with client_server() as server:
        before, start, cpu = held(len(server.sessions)), time.perf_counter(), time.process_time()
        episodes = (run_episode(sample, sibling=0, step=0, context=context) for sample in samples)
        found = await asyncio.gather(*episodes)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return Measured(list(found), seconds, cpu, before, await settled(before, lambda: len(server.sessions)))


async def measure(agents: int, *overrides: str) -> Measured:
    samples = [Sample(f"n:{number}", (Message(Role.USER, QUESTION),), "bench", "42") for number in range(agents)]
    config = configure("task=null", "chat.check_share=0", "scoring.scorers={default: gsm8k}", *overrides)
    prepared = prepare(config, "test", samples=samples, tools=[twice])
    async with open_context(prepared, script) as context:
        await played(context, samples[:6])  # imports and pools
        return await played(context, samples)


def raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, default=500)
    agents = parser.parse_args().agents
    raise_file_limit()
    peer = asyncio.run(measure(agents, "rollout.agent=tool_calling"))
    print(
        f"{agents} episodes of two turns in the built-in loop, without HTTP: {peer.seconds:.2f} s, CPU {peer.cpu:.2f} s"
    )
    rows = {
        "agent": "SDK agents, each with certificates of its own",
        "frugal_agent": "SDK agents, certificates read once",
        "bare_agent": "agents without an SDK",
    }
    for name, words in rows.items():
        report(words, asyncio.run(measure(agents, f"sdk_agents.client={Path(__file__).resolve()}:{name}")))


def report(words: str, measured: Measured) -> None:
    failed = [one.failure for one in measured.trajectories if one.failure is not None]
    turns = sum(len(one.turns) for one in measured.trajectories)
    print(f"{len(measured.trajectories)} {words}, at once: {turns} turns, {len(failed)} failed {failed[:1] or ''}")
    each = f"{1e3 * measured.cpu / turns:.2f} ms a turn"
    print(f"  {measured.seconds:.2f} s, {turns / measured.seconds:.0f} turns/s; CPU {measured.cpu:.2f} s, {each}")
    print(f"  before {measured.before}")
    print(f"  after  {measured.after}: {'nothing left behind' if measured.before == measured.after else 'LEFT BEHIND'}")


if __name__ == "__main__":
    main()
