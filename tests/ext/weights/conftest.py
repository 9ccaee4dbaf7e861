"""Shards of real FSDP processes, made once for all tests that read them, and the command line in this process."""

import contextlib
import fcntl
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise.commands.cli import main

sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))  # for `architectures`


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of checkpoints; see make_shards.py. Processes of pytest-xdist share them, and nobody writes to them."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shards"
    root.mkdir(exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "done").exists():
            script = Path(__file__).parent / "make_shards.py"
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            done = subprocess.run(
                [sys.executable, script, root], env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr[-2000:]
            (root / "done").touch()
    return root


Turnwise = Callable[..., tuple[int, str]]


@pytest.fixture
def turnwise() -> Turnwise:
    """`turnwise(*words)`: exit code and all that was printed."""

    def run(*words: object) -> tuple[int, str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main([str(word) for word in words])
        return code, out.getvalue()

    return run
