"""The pool and its sessions as an honest caller uses them: state, limits, images, levels, and what is left behind."""

import asyncio
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from turnwise.ext.sandbox import probe, scratch
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.limits import MIB, Limits
from turnwise.ext.sandbox.pool import FOLDERS, PoolSettings, SandboxPool
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage
from turnwise.ext.sandbox.zygote_process import Refusal, SandboxLost, SandboxUnavailable
from turnwise.system.folders import OwnFolder, sweep

BOTH = pytest.mark.parametrize("level", [SandboxLevel.L2, SandboxLevel.L3])


def play(body: Callable[[SandboxPool], Awaitable[object]], **settings: object) -> object:
    async def run() -> object:
        made = PoolSettings(**{"preload": (), "warm": 1, **settings})
        async with SandboxPool(made) as pool:
            return await body(pool)

    return asyncio.run(run())


@BOTH
def test_a_session_remembers_and_a_stateless_one_forgets(level: SandboxLevel) -> None:
    async def body(pool: SandboxPool) -> None:
        async with pool.session() as session, pool.session(stateless=True) as forgetful, pool.session() as other:
            for one in (session, forgetful):
                await one.run("x = 1\nopen('file', 'w').write('here')")
            assert (await session.run("x, open('file').read()")).value == "(1, 'here')"
            for one in (forgetful, other):
                assert (
                    await one.run("'x' in globals(), __import__('os').path.exists('file')")
                ).value == "(False, False)"

    play(body, level=level)


@BOTH
def test_temporary_files_and_home_are_in_the_scratch_folder(level: SandboxLevel) -> None:
    async def body(pool: SandboxPool) -> str | None:
        async with pool.session() as session:
            code = "import os, tempfile\nwith tempfile.NamedTemporaryFile() as file: found = os.path.dirname(file.name)"
            await session.run(code)
            return (await session.run("found == os.getcwd() == os.path.expanduser('~')")).value

    assert play(body, level=level) == "True"


@BOTH
def test_limits_end_a_call_and_say_what_was_lost(level: SandboxLevel) -> None:
    limits = Limits(seconds=0.3, grace=0.2, memory=64 * MIB, scratch=4 * MIB, files=20, output=200)

    async def body(pool: SandboxPool) -> None:
        async with pool.session() as session:
            await session.run("x = 1")
            soft = await session.run("print('so far')\nwhile True: pass")
            assert (soft.status, soft.kept, soft.stdout) == (ExecutionStatus.TIMEOUT, True, "so far\n")
            assert (await session.run("x")).value == "1"
            memory = await session.run("y = bytearray(100_000_000)")
            assert (memory.status, memory.kept) == (ExecutionStatus.MEMORY, True)
            long = await session.run("print('a' * 100_000)")
            assert len(long.stdout) < 500 and "left out" in long.stdout + "".join(long.notices)
            hard = await session.run("sum(range(10**12))")  # C code that looks at no signal
            assert (hard.status, hard.kept) == (ExecutionStatus.TIMEOUT, False)
            assert "lost" in hard.text()
            assert (await session.run("'x' in globals()")).value == "False"

    play(body, level=level, limits=limits)


def test_too_much_in_the_scratch_folder_ends_the_session_where_the_kernel_has_no_quota() -> None:
    code = "for n in range(8):\n    open(f'f{n}', 'wb').write(bytes(1_000_000))"

    async def body(pool: SandboxPool) -> list[ExecutionStatus]:
        async with pool.session() as session, pool.session() as other:
            many = await other.run("for n in range(50): open(str(n), 'w')")
            return [(await session.run(code)).status, many.status]

    limits = Limits(scratch=4 * MIB, files=20)
    assert play(body, level=SandboxLevel.L2, limits=limits) == [ExecutionStatus.KILLED, ExecutionStatus.KILLED]
    assert play(body, level=SandboxLevel.L3, limits=limits) == [ExecutionStatus.ERROR, ExecutionStatus.ERROR]


def test_the_scratch_folder_is_looked_at_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the code runs and after it: how long that takes is up to the code."""
    threads: list[int] = []
    real = scratch.excess

    def spy(*args: object, **kwargs: object) -> str | None:
        threads.append(threading.get_ident())
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(scratch, "excess", spy)

    async def body(pool: SandboxPool) -> object:
        async with pool.session() as session:
            return (await session.run("import time\nopen('file', 'w')\ntime.sleep(0.3)\n1")).value

    assert play(body, level=SandboxLevel.L2) == "1"
    assert len(threads) > 1 and threading.get_ident() not in threads


@BOTH
def test_images_come_in_as_copies_and_go_out_with_their_provenance(level: SandboxLevel) -> None:
    raw = InputImage("raw", bytes(range(12)), "RGB", (2, 2))

    async def body(pool: SandboxPool) -> None:
        async with pool.session(images=[raw]) as session:
            changed = await session.run("img0.putpixel((0, 0), (9, 9, 9))\nimg0")
            assert changed.images[0].pixels[:3] == b"\x09\x09\x09"
            fresh = await session.run("images['raw']")
            assert fresh.images[0].pixels == bytes(range(12))
            assert fresh.images[0].provenance.source == "raw"
            cut = await session.run("show(images['raw'].crop((1, 0, 2, 2)).resize((4, 4)))")
            assert cut.images[0].provenance.box == (1.0, 0.0, 2.0, 2.0)
            assert [step.name for step in cut.images[0].provenance.steps] == ["crop", "resize"]

    play(body, level=level)


@pytest.mark.parametrize(
    "image",
    [
        InputImage("../up.png", b"x"),
        InputImage("", b"x"),
        InputImage("a", b""),
        InputImage("a", b"xyz", "RGB", (2, 2)),
        InputImage("a", b"xyz", "RGB", None),
        InputImage("a", b"xyz", "no", (1, 1)),
    ],
)
def test_an_image_that_cannot_be_given_is_refused(image: InputImage) -> None:
    async def body() -> None:
        SandboxPool(PoolSettings()).session(images=[image])

    with pytest.raises(ValueError, match="image"):
        asyncio.run(body())


def test_many_sessions_at_once_do_not_mix_their_results() -> None:
    async def body(pool: SandboxPool) -> list[str | None]:
        async def one(number: int) -> str | None:
            async with pool.session(seed=number) as session:
                await session.run(f"x = {number}")
                return (await session.run("x")).value

        return await asyncio.gather(*(one(number) for number in range(40)))

    assert play(body, warm=4) == [str(number) for number in range(40)]


def test_a_cancelled_call_leaves_the_session_usable_and_nothing_running() -> None:
    async def body(pool: SandboxPool) -> None:
        async with pool.session() as session:
            call = asyncio.ensure_future(session.run("import time\ntime.sleep(60)"))
            await asyncio.sleep(0.2)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await session.run("1 + 1")).value == "2"
        with pytest.raises(SandboxLost, match="closed"):
            await session.run("1")

    play(body)


def test_the_report_says_what_was_proven_and_what_is_open() -> None:
    async def body(pool: SandboxPool) -> probe.SandboxReport:
        return pool.report

    report = play(body, level=SandboxLevel.L2)
    assert isinstance(report, probe.SandboxReport) and report.level is SandboxLevel.L2
    assert report.failed(SandboxLevel.L2) == ()
    assert {proof.attack.name for proof in report.failed(SandboxLevel.L3)} == {
        "learn that a file outside exists",
        "learn the host's name",
        "see other processes",
        "fill the disk",
    }
    assert "OPEN" in report.text() and "landlock" in report.text()


def test_a_level_that_was_not_proven_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel grants every layer, but one attack comes through: nothing runs at this level."""
    through = probe.Attack("come through", SandboxLevel.L3, "return 'here'")
    monkeypatch.setattr(probe, "ATTACKS", (*probe.ATTACKS, through))

    async def body(pool: SandboxPool) -> SandboxLevel:
        return pool.report.level

    assert play(body) is SandboxLevel.L2
    with pytest.raises(SandboxUnavailable, match="min_level=L3 is not available here.*\n.*come through"):
        play(body, min_level=SandboxLevel.L3)


def test_a_refused_layer_is_named_with_its_error_and_a_remedy() -> None:
    refused = Refusal("namespaces", "unshare(NEWUSER)", 1)
    text = probe.explain(SandboxLevel.auto, SandboxLevel.L3, (refused,), None)
    assert "sandbox.min_level=L3" in text and "unshare(NEWUSER): Operation not permitted" in text
    assert "min_level=L2" in text


def test_a_dead_owners_folder_is_swept_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = OwnFolder(FOLDERS)
    dead = tmp_path / f"{FOLDERS}dead"
    (dead / "root" / "1").mkdir(parents=True)
    (dead / "lock").touch()
    strange = tmp_path / f"{FOLDERS}strange"
    os.symlink("/", strange)
    sweep(FOLDERS, tmp_path)
    assert not dead.exists() and living.path.exists() and strange.is_symlink()
    living.remove()
    assert not living.path.exists()


def test_the_folder_of_a_session_is_its_users_alone(tmp_path):
    """Without a file system of its own (L2), other users of the machine must not see what a session writes."""
    (tmp_path / "root").mkdir()
    pool = SandboxPool()
    pool._folder = SimpleNamespace(path=tmp_path)
    before = os.umask(0)
    try:
        folder = pool._new_folder(os.geteuid())
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_of_the_default_packages_those_that_are_not_installed_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = ("numpy", "no_such_package.plot", "no_eyes.a", "no_eyes.b")
    monkeypatch.setattr("turnwise.ext.sandbox.pool.PRELOADED", packages)
    monkeypatch.setattr("turnwise.ext.sandbox.pool.VISION", packages[2:])

    async def body(pool: SandboxPool) -> str | None:
        assert "cannot import no_such_package: pip install 'turnwise[sandbox]'" in pool.report.summary()
        assert "no_eyes" not in pool.report.summary()
        assert "code about images cannot import no_eyes: pip install 'turnwise[vision]'" in pool.report.text()
        async with pool.session() as session:
            return (await session.run("import sys\n'numpy' in sys.modules")).value

    assert play(body, preload=packages) == "True"
