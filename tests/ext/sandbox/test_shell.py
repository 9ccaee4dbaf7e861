"""Shell sessions: what was proven of them, what commands may do, and that a session outlives every one of them."""

import asyncio
import os
from pathlib import Path

import pytest

from turnwise.ext.sandbox.attacks import ATTACKS, Attack
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.pool import PoolSettings
from turnwise.ext.sandbox.shell import attacks as shell_attacks
from turnwise.ext.sandbox.shell.pool import ShellPool
from turnwise.ext.sandbox.zygote_process import SandboxLost, SandboxUnavailable


def play(make, work):
    async def main():
        async with make() as pool:
            return await work(pool)

    return asyncio.run(asyncio.wait_for(main(), 120))


def test_every_attack_is_tried_and_none_comes_through(shells) -> None:
    async def work(pool):
        return pool.report

    report = play(shells, work)
    assert report.level is SandboxLevel.L3
    tried = {proof.attack.name for proof in report.proofs}
    assert {attack.name for attack in ATTACKS} - tried == shell_attacks.ALLOWED_HERE - {"see other processes"}
    assert tried >= {"start more processes than allowed", "outlive the command", "outlast the time limit"}
    assert [proof.attack.name for proof in report.proofs if not proof.blocked] == []


def test_a_level_that_is_not_proven_runs_nothing(shells, monkeypatch) -> None:
    with pytest.raises(SandboxUnavailable, match="have one level, L3"):
        ShellPool(PoolSettings(level=SandboxLevel.L2))
    through = Attack("come through", SandboxLevel.L3, "return 'here'")
    monkeypatch.setattr(shell_attacks, "IN_ONE_PROCESS", (*shell_attacks.IN_ONE_PROCESS, through))

    async def work(pool):
        raise AssertionError("the pool must not open")

    with pytest.raises(SandboxUnavailable, match="shell sessions need L3: .*\n.*come through"):
        play(shells, work)


def test_commands_share_files_and_nothing_else(shells) -> None:
    async def work(pool):
        async with pool.shell() as one, pool.shell() as other:
            await one.run("echo kept > file; export LOST=1; cd /")
            return [
                await one.run("cat file; pwd; echo ${LOST:-gone}; exit 3"),
                await other.run("cat file"),
                await one.run("cat", stdin=b"given\n"),
                await one.run("yes | head -c 100000", output=1000),
                await one.run("chmod +x file && printf '#!/bin/sh\\necho ran' > file && ./file"),
                await one.run("x" * 200_000),
                await one.run('python -c \'import subprocess; print(subprocess.check_output(["echo", "hi"]))\''),
            ]

    shared, apart, given, long, script, too_long, nested = play(shells, work)
    assert (shared.output, shared.exit) == ("kept\n/scratch\ngone\n", 3)
    assert apart.exit == 1 and "No such file" in apart.output
    assert given.output == "given\n"
    assert "characters left out" in long.output and len(long.output) < 1200
    assert script.output == "ran\n"
    assert too_long.exit == 126 and "not run" in too_long.output
    assert nested.output == "b'hi\\n'\n"


def processes_of(pool: ShellPool) -> set[int]:
    """Everything below the pool's zygote, as the host sees it."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {pool._zygote.process.pid}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def test_a_session_outlives_what_its_commands_do_to_it(shells) -> None:
    attacks = {
        "time": "trap '' TERM INT; (setsid sleep 1000 &) ; sleep 1000",
        "forks": ":(){ :|:& };: ; sleep 1000",
        "memory": "for i in 1 2 3 4; do python -c 'x = bytearray(60 << 20); import time; time.sleep(100)' & done; wait",
        "disk": "head -c 20000000 /dev/zero > big; rm -f big; echo full",
        "kill": "kill -9 -1",
        "stop": "kill -USR1 1; sleep 1000",
        "signals": "for s in INT TERM HUP CHLD USR2 STOP; do kill -$s 1; done; echo alive",
    }

    async def work(pool):
        found = {}
        async with pool.shell() as session:
            await session.run("echo kept > file")
            quiet = processes_of(pool)
            for name, command in attacks.items():
                found[name] = await session.run(command, seconds=1 if name in ("time", "forks") else 20)
                assert (await session.run("cat file")).output == "kept\n", name
                assert processes_of(pool) == quiet, name
        with pytest.raises(SandboxLost, match="was closed"):
            await session.run("true")
        return found

    found = play(shells, work)
    assert found["time"].stopped == found["forks"].stopped == "stopped after 1 s"
    assert "held more than" in found["memory"].stopped
    assert "No space left" in found["disk"].output
    assert found["kill"].exit == 1  # nobody is there but the shell itself and the first process
    assert "ended itself" in found["stop"].stopped
    assert found["signals"].output == "alive\n"


def test_a_call_that_is_cancelled_loses_the_session_and_its_processes(shells) -> None:
    async def work(pool):
        session = pool.shell()
        await session.run("true")
        calling = asyncio.ensure_future(session.run("sleep 1000", seconds=900))
        await asyncio.sleep(0.2)
        calling.cancel()
        await asyncio.wait((calling,))
        with pytest.raises(SandboxLost, match="was lost"):
            await session.run("true")
        return len(processes_of(pool))

    assert play(shells, work) == 2  # the zygote and its parent
