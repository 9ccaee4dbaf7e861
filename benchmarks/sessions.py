"""1,000 sessions of an HTTP environment at once, through whole episodes: sessions/s, and what is left behind.

The number game of `examples/http_env/server.py`, in a process of its own, is played by a scripted sampler which
halves the range. One episode in ten is given up after two turns, one in ten is cancelled from outside. All sessions are
open before the first answer is given. The peer sends the same number of requests with the same client and no rollout.
Afterwards nothing may be left: sessions on the server, open files and asyncio tasks here.

    python benchmarks/sessions.py [--sessions 1000] [--rounds 3]
"""

import argparse
import asyncio
import contextlib
import gc
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from turnwise.data.task_config import configure
from turnwise.engines.samplers.scripted import ScriptRequest
from turnwise.ext.http_env.loop import EnvironmentClient, HttpEnvOptions
from turnwise.rollout.episode import RolloutContext, run_episode
from turnwise.rollout.prepare import open_context, prepare
from turnwise.scoring.event_loop_resources import close_loop_resources
from turnwise.types import Message, Role, Sample, Trajectory

SERVER = Path(__file__).parent.parent / "examples" / "http_env" / "server.py"
_HINT = re.compile(r"(\d+)[^0-9]*?(Higher|Lower)\.")


@dataclass(frozen=True, slots=True)
class Left:
    """What is open: on the server, and here."""

    sessions: int
    files: int
    tasks: int


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement."""

    seconds: float
    finished: int
    given_up: int
    cancelled: int
    requests: int
    most_open: int
    """Sessions open on the server at once."""
    before: Left
    after: Left


class Crowd:
    """A script that answers nobody's first turn before all have come, and then plays well or badly by turns."""

    def __init__(self) -> None:
        self.waiting = 0
        self.most_open = 0

    def __call__(self, request: ScriptRequest) -> str:
        if int(request.noise.sample.rpartition(":")[2]) % 10 == 1:
            return "I give up."
        low, high = 1, 100
        for guess, hint in _HINT.findall(request.text.partition("higher or lower")[2]):
            low, high = (int(guess) + 1, high) if hint == "Higher" else (low, int(guess) - 1)
        return str((low + high) // 2)


def samples(count: int) -> list[Sample]:
    """Rows as the task makes them."""
    return [
        Sample(f"s:{n}", (Message(Role.USER, "-"),), "chat_env", info={"extra_info": {"name": "guess", "index": n}})
        for n in range(count)
    ]


async def left(url: str) -> Left:
    """Counted after a moment in which closed connections go."""
    gc.collect()
    await asyncio.sleep(0.2)
    async with httpx.AsyncClient() as client:
        sessions = (await client.get(f"{url}/health")).json()["sessions"]
    await asyncio.sleep(0)
    return Left(sessions, len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()))


async def measure(url: str, count: int) -> Round:
    """One round of so many sessions at once."""
    config = configure("task=chat_env", "engine=scripted", "rollout.max_assistant_turns=8", "chat.check_share=0")
    config.rollout.agent_options = {"url": url}
    prepared = prepare(config, "test", samples=samples(count))
    crowd = Crowd()
    async with open_context(prepared, crowd) as context:
        before = await left(url)
        gate = Gate(context, count)
        start = time.perf_counter()
        playing = [
            asyncio.ensure_future(run_episode(one, sibling=0, step=1, context=gate.context)) for one in prepared.samples
        ]
        await gate.full.wait()
        most_open = (await left(url)).sessions
        waited = time.perf_counter()
        opened = waited - start
        for number, task in enumerate(playing):
            if number % 10 == 2:
                task.cancel()
        gate.open.set()
        restart = time.perf_counter()
        found = await asyncio.gather(*playing, return_exceptions=True)
        seconds = opened + time.perf_counter() - restart
        del playing
        done = [one for one in found if isinstance(one, Trajectory)]
        failures = [one.failure for one in done if one.failure] + [one for one in found if isinstance(one, Exception)]
        if failures:
            raise SystemExit(f"{len(failures)} episodes failed: {failures[0]}")
        await close_loop_resources()
        after = await left(url)
    finished = sum(bool(one.facts.environment and one.facts.environment.finished) for one in done)
    requests = sum(len(one.turns) for one in done) + 2 * count - finished
    return Round(seconds, finished, len(done) - finished, len(found) - len(done), requests, most_open, before, after)


class Gate:
    """Holds every first turn until all sessions are open."""

    def __init__(self, context: RolloutContext, count: int) -> None:
        self.open, self.full = asyncio.Event(), asyncio.Event()
        self._count, self._come = count, 0
        self.context = context
        sampler = context.make_backend("-", None, []).sampler  # type: ignore[arg-type, attr-defined]
        write = sampler.generate

        async def generate(request: object) -> object:
            if not self.open.is_set():
                self._come += 1
                if self._come == self._count:
                    self.full.set()
                await self.open.wait()
            return await write(request)

        sampler.generate = generate


async def bare(url: str, requests: int, count: int) -> float:
    """Seconds for as many requests by the client alone, so many at once."""
    client = EnvironmentClient(HttpEnvOptions(url))
    each = max(1, requests // count)

    async def one(index: int) -> None:
        _, session = await client.post("/start_sample", {"name": "guess", "index": index})
        for _ in range(each - 2):
            await client.post("/interact", {"messages": [{"role": "assistant", "content": "none"}]}, session)
        await client.post("/cancel", {}, session)

    start = time.perf_counter()
    try:
        await asyncio.gather(*(one(index) for index in range(count)))
    finally:
        await client.close()
    return (time.perf_counter() - start) * requests / (each * count)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The small server in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, str(SERVER), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(600):
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def main() -> None:
    """Print the rounds; exit 1 when anything is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    leaks = 0
    with server() as url:
        for number in range(args.rounds):
            found = asyncio.run(measure(url, args.sessions))
            peer = asyncio.run(bare(url, found.requests, args.sessions))
            leaks += found.before != found.after
            print(
                f"round {number + 1}: {found.most_open} sessions open at once; {found.finished} finished, "
                f"{found.given_up} given up, {found.cancelled} cancelled\n"
                f"  {args.sessions / found.seconds:.0f} sessions/s, {found.requests / found.seconds:.0f} requests/s; "
                f"{found.seconds / peer:.2f} times the client alone\n"
                f"  before {found.before}\n  after  {found.after}"
            )
    sys.exit(f"{leaks} rounds left something behind" if leaks else 0)


if __name__ == "__main__":
    main()
