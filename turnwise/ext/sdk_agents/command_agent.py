"""An agent that is a program of its own: started for each episode, told by its environment whom to call, and killed
with all that it started when the episode is over."""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import IO, Any

from turnwise.errors import ConfigError
from turnwise.rollout import plugin_calls
from turnwise.rollout.openai_messages import data_url
from turnwise.types import Image, Message, Sample

PREFIX = "exec:"
MOST_PRINTED = 1 << 20
"""Bytes that it may print."""
SHOWN = 2000
"""Bytes of its last complaints that are shown."""
GRACE_SECONDS = 5.0
"""For what it printed to be read once it is gone; only what left its process group can still hold the pipes."""
POLL_SECONDS = 0.05
OUR_KEY = "turnwise"
PASSED_ON = frozenset(
    {"PATH", "HOME", "SHELL", "TERM", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR"}
    | {"PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "VIRTUAL_ENV", "CONDA_PREFIX", "NODE_PATH", "LD_LIBRARY_PATH"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"}
)
"""Variables that every program gets, with LC_*: where things are, and no secrets."""


class CommandFailed(Exception):
    """The program did what none may do."""


class CommandEnded(CommandFailed):
    """The program ended otherwise than by saying that all is well."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{_ending(status)}: {words or 'it said nothing on stderr'}")
        self.status, self.words = status, words


def command_agent(spec: str, variables: Sequence[str] = ()) -> Callable[[str, Sample], Awaitable[str]]:
    """The agent of `exec:python agent.py`; what it prints is its result. No shell reads the command. Of our environment
    it gets little more than these variables."""
    try:
        command = shlex.split(spec.removeprefix(PREFIX))
    except ValueError as error:
        raise ConfigError(f"sdk_agents.client {spec!r} is not a command: {error}") from error
    if not command:
        raise ConfigError(f"sdk_agents.client {spec!r} has no command after {PREFIX}")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"sdk_agents.client {spec!r}: there is no program {command[0]!r} here")

    for name in variables:
        if name not in os.environ:
            raise ConfigError(f"sdk_agents.client_env: the environment variable {name} is not set")

    async def agent(base_url: str, sample: Sample) -> str:
        return await _run(command, _environment(base_url, variables), sample)

    return agent


async def _run(command: Sequence[str], environment: dict[str, str], sample: Sample) -> str:
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(_as_json(sample)).encode() + b"\n")
        stdin.seek(0)
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=stdin, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
        )
    assert process.stdout is not None and process.stderr is not None
    output = asyncio.ensure_future(_printed(process.stdout))
    complained = asyncio.ensure_future(_last(process.stderr))
    try:
        status = await _ended(process, output)
        _kill(process)  # what it left behind may hold the pipes
        await asyncio.wait((output, complained), timeout=GRACE_SECONDS)
        if status:
            words = complained.result().decode(errors="replace").strip() if complained.done() else ""
            raise CommandEnded(status, words)
        if not output.done():
            raise CommandFailed("something that it started holds its output open")
        return output.result().decode(errors="replace").strip()
    finally:
        _kill(process)
        output.cancel()
        complained.cancel()
        await plugin_calls.to_the_end(_gone(process, output, complained))


async def _ended(process: "subprocess.Popen[bytes]", output: "asyncio.Future[bytes]") -> int:
    """Its exit status; CommandFailed as soon as it has printed too much. Not by asyncio, which would wait for all who
    hold its pipes, and they are to be killed when it has ended. It is not reaped before: until then its number, which
    is its group's, is nobody else's."""
    while True:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if output.done():
            output.result()
            await asyncio.sleep(POLL_SECONDS)
        else:  # an end of its output is mostly its own
            await asyncio.wait((output,), timeout=POLL_SECONDS)


async def _gone(process: "subprocess.Popen[bytes]", *work: "asyncio.Future[bytes]") -> None:
    await asyncio.wait(work)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    while process.poll() is None:
        await asyncio.sleep(POLL_SECONDS)


@contextlib.asynccontextmanager
async def _reading(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        yield reader
    finally:
        transport.close()


async def _printed(pipe: IO[bytes]) -> bytes:
    data = bytearray()
    async with _reading(pipe) as stream:
        while piece := await stream.read(1 << 16):
            data += piece
            if len(data) > MOST_PRINTED:
                raise CommandFailed(f"it printed more than {MOST_PRINTED} bytes; what it prints is its result")
    return bytes(data)


async def _last(pipe: IO[bytes]) -> bytes:
    tail = b""
    async with _reading(pipe) as stream:
        while piece := await stream.read(1 << 16):
            tail = (tail + piece)[-SHOWN:]
    return tail


def _as_json(sample: Sample) -> dict[str, Any]:
    """What an agent is told; the right answer is for those who score."""
    prompt = [{"role": message.role.value, "content": _content(message)} for message in sample.prompt]
    return {"id": sample.id, "data_source": sample.data_source, "prompt": prompt, "info": sample.info}


def _content(message: Message) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "image_url", "image_url": {"url": data_url(part)}}
        if isinstance(part, Image)
        else {"type": "text", "text": part.text}
        for part in message.content
    ]


def _environment(base_url: str, variables: Sequence[str]) -> dict[str, str]:
    """The addresses that SDKs look for, keys that open nothing, and what of ours a program may know."""
    wanted = PASSED_ON | set(variables)
    environment = {name: value for name, value in os.environ.items() if name in wanted or name.startswith("LC_")}
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(hosts for hosts in (environment.get(name), "127.0.0.1") if hosts)
    ours = {"OPENAI_BASE_URL": base_url, "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1")}
    return environment | ours | {"OPENAI_API_KEY": OUR_KEY, "ANTHROPIC_API_KEY": OUR_KEY}


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """With all that it started, unless it is reaped already."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _ending(status: int) -> str:
    return f"exit status {status}" if status > 0 else f"ended by signal {-status}"
