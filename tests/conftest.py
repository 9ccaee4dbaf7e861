"""What tests of more than one room need: whether results can be exact on this machine, and servers on real ports."""

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import turnwise

sys.path.insert(0, str(Path(__file__).parent))  # test files are imported by path; what all rooms share is found by name

TINY = Path(next(iter(turnwise.__path__))) / "engines" / "bundled" / "tiny"


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` shows a GPU to the tests: all others are about what happens without one, on every machine."""
    examples = int(os.environ.get("TURNWISE_EXAMPLES", "100"))  # fewer where a suite is only tried on another Python
    settings.register_profile(
        "any machine", deadline=None, max_examples=examples
    )  # how long an example takes depends on who else computes
    settings.load_profile("any machine")
    if "gpu" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before any test file imports triton, as some models' code does
    for name in (
        "BASE_MODEL_PATH",
        "VLLM_MODEL_PATH",
        "DATA_REPO",
        "DATA_CACHE",
        "LLM_AS_A_JUDGE_BASE",
        "WANDB_PROJECT",
    ):
        os.environ.pop(name, None)  # they fill in what a config leaves open, and tests leave much open
    os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir()) / f"turnwise-tests-{os.getuid()}")


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test works in an empty folder: what a clone was used for (runs/, data/, a config) changes no test."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd", numbered=True))


@pytest.fixture(scope="session")
def engine_is_exact() -> bool:
    """Whether the torch engine proves that batching changes no bit of the bundled model here."""
    from turnwise.engines.model.decoder import Decoder
    from turnwise.engines.samplers.cpu.threads import choose_threads

    decoder = Decoder.read(TINY)
    return all(choose_threads(decoder, threads).invariant for threads in (0, 1))


@pytest.fixture
def exact_engine(engine_is_exact: bool) -> None:
    """Skips a test of bitwise equal results where the engine says that it cannot promise them."""
    if not engine_is_exact:
        pytest.skip("the torch engine found no regime on this machine in which batching changes no bit")


@contextlib.asynccontextmanager
async def _serving(app: Any) -> AsyncIterator[str]:
    uvicorn = pytest.importorskip("uvicorn")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    running = asyncio.ensure_future(server.serve())
    while not server.started:
        assert not running.done()
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


@contextlib.contextmanager
def _serving_in_a_thread(open_app: Callable[[], contextlib.AbstractAsyncContextManager[Any]]) -> Iterator[str]:
    started: concurrent.futures.Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = (
        concurrent.futures.Future()
    )

    async def main() -> None:
        done = asyncio.Event()
        async with open_app() as app, _serving(app) as url:
            started.set_result((url, asyncio.get_running_loop(), done))
            await done.wait()

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    url, loop, done = started.result(60)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def serving() -> Callable[[Any], contextlib.AbstractAsyncContextManager[str]]:
    """An app on a real port, in the test's own event loop: its URL."""
    return _serving


@pytest.fixture(scope="session")
def serving_in_a_thread() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """What an async context manager opens, on a real port, with an event loop of its own: its URL."""
    return _serving_in_a_thread


@pytest.fixture(scope="session")
def shells() -> Callable[..., Any]:
    """Makes a pool of shell sessions, still to be entered; skips where the kernel has no namespaces for one."""
    import subprocess
    import sys

    from turnwise.ext.sandbox.limits import MIB, Limits
    from turnwise.ext.sandbox.pool import PoolSettings
    from turnwise.ext.sandbox.shell.pool import ShellPool

    script = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000) == -1)"
    if subprocess.run([sys.executable, "-c", script]).returncode:
        pytest.skip("this kernel has no user namespaces")

    def make(**limits: Any) -> ShellPool:
        return ShellPool(PoolSettings(limits=Limits(**{"memory": 128 * MIB, "scratch": 8 * MIB, **limits}), warm=0))

    return make
