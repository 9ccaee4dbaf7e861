"""Sessions over HTTP, against our own server; other servers are in test_remote_servers.py."""

import asyncio
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from PIL import Image

from turnwise.errors import ConfigError
from turnwise.ext.sandbox import remote
from turnwise.ext.sandbox.level import SandboxLevel
from turnwise.ext.sandbox.pool import PoolSettings, SandboxPool
from turnwise.ext.sandbox.remote import RemotePool
from turnwise.ext.sandbox.results import ExecutionStatus, InputImage
from turnwise.ext.sandbox.server import ServerSettings, make_app
from turnwise.ext.sandbox.zygote_process import SandboxLost, SandboxUnavailable

TOKEN = "a-token-for-tests"
POOL = PoolSettings(preload=("numpy", "PIL.Image"), warm=2)


@contextlib.asynccontextmanager
async def ours(settings=None):
    settings = settings or ServerSettings(pool=POOL)
    async with SandboxPool(settings.pool) as pool:
        yield make_app(pool, TOKEN, settings)


@pytest.fixture(scope="module")
def url(serving_in_a_thread):
    with serving_in_a_thread(ours) as url:
        yield url


def in_session(url, work, seed=0, images=(), stateless=False, token=TOKEN, **more):
    """The result of `work(session)`."""

    async def main():
        async with RemotePool(url, token, **more) as pool:
            async with pool.session(seed=seed, images=images, stateless=stateless) as session:
                return await work(session)

    return asyncio.run(main())


def test_state_survives_between_calls_and_not_between_sessions(url):
    async def work(session):
        assert (await session.run("x = 20\nprint('made')")).stdout == "made\n"
        return await session.run("x + 1")

    result = in_session(url, work)
    assert (result.status, result.value, result.kept) == (ExecutionStatus.OK, "21", True)
    other = in_session(url, lambda session: session.run("x"))
    assert (other.status, other.failure.kind) == (ExecutionStatus.ERROR, "NameError")


def test_stateless_sessions_forget(url):
    async def work(session):
        await session.run("x = 20")
        return await session.run("x")

    assert in_session(url, work, stateless=True).failure.kind == "NameError"


def test_a_remote_result_is_the_local_result(url):
    pixels = Image.linear_gradient("L").tobytes()
    images = [InputImage("ramp", pixels, "L", (256, 256))]
    calls = [
        "import random, sys\nprint(random.random())\nprint('err', file=sys.stderr)\n{'a': 1}",
        "def f(n):\n    return 1 / n\nf(0)",
        "part = img0.crop((10, 20, 40, 50))\nshow(part.resize((60, 60)))",
        "open('/etc/shadow')",
        "x = bytearray(10**10)",
        "print('y' * 30_000)",
        "import os; os.abort()",
        "'fresh'",
    ]

    async def work(session):
        return [await session.run(code, 5) for code in calls]

    async def at_home():
        async with SandboxPool(POOL) as pool, pool.session(seed=7, images=images) as session:
            return await work(session)

    def core(result):
        return (
            result.status,
            result.stdout,
            result.stderr,
            result.value,
            result.images,
            result.failure,
            result.notices,
            result.kept,
        )

    remote_results = in_session(url, work, seed=7, images=images)
    local_results = asyncio.run(at_home())
    assert [core(one) for one in remote_results] == [core(one) for one in local_results]
    assert len(remote_results[2].images) == 1
    assert remote_results[2].images[0].provenance.source == "ramp"


def test_an_image_file_goes_in_and_pixels_come_out(url):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 4), (1, 2, 3)).save(buffer, "PNG")
    code = "from PIL import Image\nshow(Image.open('photo.png').rotate(90, expand=True))"
    result = in_session(url, lambda session: session.run(code), images=[InputImage("photo.png", buffer.getvalue())])
    assert [(one.mode, one.size, one.pixels) for one in result.images] == [("RGB", (4, 8), bytes([1, 2, 3]) * 32)]


def test_a_timeout_is_a_result(url):
    async def work(session):
        await session.run("x = 1")
        stopped = await session.run("while True: pass", 0.2)
        return stopped, await session.run("x")

    stopped, after = in_session(url, work)
    assert (stopped.status, stopped.kept, after.value) == (ExecutionStatus.TIMEOUT, True, "1")


def test_64_sessions_at_once_are_not_mixed_up(url):
    async def one(pool, number):
        async with pool.session(seed=number) as session:
            await session.run(f"mine = {number}")
            return (await session.run("mine * 1000 + mine")).value

    async def main():
        async with RemotePool(url, TOKEN) as pool:
            return await asyncio.gather(*(one(pool, number) for number in range(64)))

    assert asyncio.run(main()) == [str(number * 1001) for number in range(64)]


def test_the_report_is_the_server_s(url):
    async def main():
        async with RemotePool(url + "/run_code", TOKEN) as pool:
            return pool.report

    report = asyncio.run(main())
    assert report.level.reaches(SandboxLevel.L2)
    assert "blocked  read a file outside" in report.text()


def test_a_level_the_server_has_not_proven_is_refused_before_any_code_is_sent(url):
    with pytest.raises(SandboxUnavailable, match="min_level=L4"):
        in_session(url, lambda session: session.run("1"), min_level=SandboxLevel.L4)


@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_wrong_token_is_said_to_be_wrong(url, token):
    with pytest.raises(SandboxUnavailable, match="token"):
        in_session(url, lambda session: session.run("1"), token=token)


def test_code_that_cannot_be_sent_is_the_code_s_fault(url):
    assert in_session(url, lambda session: session.run("print('\ud800')")).status is ExecutionStatus.ERROR
    assert in_session(url, lambda session: session.run("#" * (1 << 21))).status is ExecutionStatus.ERROR


def test_an_expired_session_is_lost_and_stays_lost(serving_in_a_thread):
    with serving_in_a_thread(lambda: ours(ServerSettings(pool=POOL, idle_seconds=0.2))) as url:

        async def work(session):
            await session.run("x = 1")
            await asyncio.sleep(1.5)
            for _ in range(2):
                with pytest.raises(SandboxLost):
                    await session.run("x = 2")

        in_session(url, work)


def test_a_session_that_held_nothing_yet_may_start_again(url):
    async def work(session):
        session._number = "A" * 32  # as if the server had forgotten it
        with pytest.raises(SandboxLost):
            await session.run("1")
        return await session.run("2")

    assert in_session(url, work).value == "2"


def test_closing_frees_the_server_s_place(serving_in_a_thread):
    with serving_in_a_thread(lambda: ours(ServerSettings(pool=POOL, sessions=1))) as url:
        for number in range(3):
            assert in_session(url, lambda session, n=number: session.run(str(n)), retries=0).value == str(number)


def test_a_full_server_is_tried_again(serving_in_a_thread):
    with serving_in_a_thread(lambda: ours(ServerSettings(pool=POOL, sessions=1))) as url:

        async def main():
            async with RemotePool(url, TOKEN, retries=8) as pool:
                first = pool.session()
                await first.run("1")
                waiting = asyncio.ensure_future(pool.session().run("2"))
                await asyncio.sleep(0.3)
                assert not waiting.done()
                await first.close()
                return await waiting

        assert asyncio.run(main()).value == "2"


def test_a_url_is_checked():
    with pytest.raises(ConfigError, match="http"):
        RemotePool("localhost:8080")
    with pytest.raises(ConfigError, match="password"):
        RemotePool("http://me:secret@localhost")
    with pytest.raises(ConfigError, match="min_level"):
        RemotePool("http://localhost", min_level=SandboxLevel.auto)


def test_no_server_at_all():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SandboxUnavailable, match="does not accept connections"):
        in_session(f"http://127.0.0.1:{port}", lambda session: session.run("1"), retries=1)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_server_killed_in_the_middle_of_a_call_loses_it_and_nothing_else(tmp_path):
    port = free_port()
    program = (
        "import asyncio\nfrom turnwise.ext.sandbox.pool import PoolSettings\n"
        "from turnwise.ext.sandbox.server import ServerSettings, serve\n"
        f"asyncio.run(serve('127.0.0.1', {port}, {TOKEN!r}, ServerSettings(pool=PoolSettings(preload=(), warm=1))))"
    )
    root = str(Path(remote.__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)}  # killed, it cannot tidy up
    server = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:

        async def main():
            async with RemotePool(f"http://127.0.0.1:{port}", TOKEN, retries=10) as pool:
                session, later = pool.session(), pool.session()
                assert (await session.run("1 + 1")).value == "2"
                call = asyncio.ensure_future(session.run("import time; time.sleep(30)", 60))
                await asyncio.sleep(0.5)
                assert not call.done()
                server.send_signal(signal.SIGKILL)
                server.wait()
                with pytest.raises(SandboxLost):
                    await call
                pool._retries = 0
                with pytest.raises(SandboxLost, match="does not accept connections"):
                    await later.run("1")

        asyncio.run(main())
    finally:
        server.kill()
        server.wait()


def test_verl_s_own_request_is_understood(url):
    payload = {
        "compile_timeout": 30,
        "run_timeout": 30,
        "code": "print(input())",
        "stdin": "hello",
        "language": "python",
    }
    answer = httpx.post(url + "/run_code", json=payload, headers={"Authorization": f"Bearer {TOKEN}"}).json()
    ran = answer["run_result"]
    assert (answer["status"], ran["status"], ran["stdout"] + ran["stderr"]) == ("Success", "Finished", "hello\n")
