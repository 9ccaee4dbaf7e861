"""Servers that we start: waited for, explained when they die, and gone with us even when we are killed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inference_servers import is_there

from turnwise.errors import EngineLost
from turnwise.ext.servers import process as server_process
from turnwise.ext.servers.process import ServerProcess

STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {worker.pid}")
time.sleep(600)
"""
"""A server with a worker that wants to go on without it."""


def process(log: Path, code: str, *more: str, said: list[str] | None = None) -> ServerProcess:
    def command(port: int) -> list[str]:
        return [sys.executable, "-c", code, *more]

    say = (said if said is not None else []).append
    return ServerProcess("server 0", command, log=log, environment={"ADDED": "yes"}, say=say)


async def never() -> bool:
    return False


def test_one_that_dies_while_it_starts_is_explained_by_its_own_last_words(tmp_path: Path) -> None:
    code = "import os, sys; print('hello'); print('ValueError: no memory', os.environ['ADDED']); sys.exit(3)"
    with pytest.raises(EngineLost, match=r"server 0 ended while it started: .*ValueError: no memory yes .*server\.log"):
        asyncio.run(process(tmp_path / "a" / "server.log", code).start(never))
    missing = ServerProcess("m", lambda port: ["/no/such/program"], log=tmp_path / "m", environment={}, say=print)
    with pytest.raises(EngineLost, match=r"No such file or directory: '/no/such/program'"):
        asyncio.run(missing.start(never))
    assert (tmp_path / "m").read_text().startswith("--- /no/such/program\n")


LATE = """
import pathlib, socket, sys, time
first = pathlib.Path(sys.argv[2])
if not first.exists():
    first.touch()
    sys.exit("OSError: [Errno 98] Address already in use")
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    time.sleep(600)
"""
"""A server whose port somebody else takes the first time."""


def test_a_port_that_is_taken_meanwhile_costs_another_start_and_ours_is_given_to_nobody_else(tmp_path: Path) -> None:
    ports, said = list[int](), list[str]()

    def command(port: int) -> list[str]:
        ports.append(port)
        with pytest.raises(OSError), socket.socket() as other:  # while the server starts, the port is ours
            other.bind(("127.0.0.1", port))
        return [sys.executable, "-c", LATE, str(port), str(tmp_path / "first")]

    server = ServerProcess("server 0", command, log=tmp_path / "log", environment={}, say=said.append)

    async def listens() -> bool:
        with socket.socket() as asking:
            return asking.connect_ex(("127.0.0.1", server.port)) == 0

    async def main() -> None:
        await server.start(listens)
        assert server.alive and server.port == ports[1]
        await server.stop()

    asyncio.run(main())
    assert len(ports) == 2 and any(f"port {ports[0]} was taken" in text for text in said)


def test_one_that_does_not_answer_is_spoken_of_then_given_up_with_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "SAY_SECONDS", 0.1)
    said: list[str] = []
    pids = tmp_path / "pids"

    async def main() -> None:
        await process(tmp_path / "log", STUBBORN, str(pids), said=said).start(never, 1.5)

    with pytest.raises(EngineLost, match="does not answer after 1.5 s"):
        asyncio.run(main())
    assert any("starting for" in text for text in said)
    assert not any(map(is_there, map(int, pids.read_text().split())))


def test_a_server_ends_with_us_when_we_are_killed_and_its_workers_too(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"""
import asyncio, pathlib, sys
from turnwise.ext.servers import process as server_process
pids = pathlib.Path({str(pids)!r})
async def healthy():
    return pids.exists() and len(pids.read_text().split()) == 2
async def main():
    command = [sys.executable, "-c", {STUBBORN!r}, str(pids)]
    server = server_process.ServerProcess("s", lambda port: command, log=pids.with_name("log"), environment={{}}, say=print)
    await server.start(healthy)
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert any(line.startswith("up") for line in parent.stdout)
        server, worker = map(int, pids.read_text().split())
        assert is_there(server) and is_there(worker)
        os.kill(parent.pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while (is_there(server) or is_there(worker)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_there(server) and not is_there(worker)
