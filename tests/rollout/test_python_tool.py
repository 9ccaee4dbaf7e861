"""The python tool: results, errors the model can act on, and limits that leave nothing behind."""

import asyncio
import os
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest

from turnwise.errors import ToolError
from turnwise.rollout.tools.python import MAX_OUTPUT, PythonTool, python, run_python
from turnwise.rollout.tools.tool import ToolContext, validate
from turnwise.types import Sample


@pytest.fixture(autouse=True)
def no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Programs run in folders under this one; none may stay."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield
    assert list(scratch.iterdir()) == []


def run(code: str, seconds: float | None = 60.0) -> str:
    return asyncio.run(run_python(code, seconds))


def error(code: str, seconds: float | None = 60.0) -> str:
    with pytest.raises(ToolError) as caught:
        run(code, seconds)
    return str(caught.value)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still alive"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42"),
        ("6 * 7", "42"),
        ("x = 6\nx * 7  # the answer", "42"),
        ("'a'", "'a'"),
        ("print('a')\n5", "a"),
        ("import sys\nsys.stdout.write('a')\n5", "a"),
        ("None", "(no output)"),
        ("x = 1", "(no output)"),
        ("", "(no output)"),
        ("# nothing", "(no output)"),
        ("print(__name__)", "__main__"),
        ("print('a')\nexit()", "a"),
        ("import sys\nprint('a')\nsys.exit(0)", "a"),
        ("print('ä €')", "ä €"),
        ("print(chr(0xd800))", "\\ud800"),
        ("import sys\nsys.stdout.buffer.write(b'\\xff\\xfea')\nNone", "\ufffd\ufffda"),
        ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nprint(f(5))", "120"),
        ("import numpy\nprint(int(numpy.arange(5).sum()))", "10"),
        ("if __name__ == '__main__':\n    print('main')", "main"),
        ("import sys\nprint(sys.argv, 'run' in globals())", "['<code>'] False"),
    ],
)
def test_output(code: str, output: str) -> None:
    assert run(code) == output


def test_the_order_of_sets_is_the_same_in_every_run() -> None:
    code = "print({'alpha', 'beta', 'gamma', 'delta', 'epsilon'})"
    assert len({run(code) for _ in range(4)}) == 1


@pytest.mark.parametrize(
    ("code", "pieces"),
    [
        ("x = 1\ny = x / 0", ['File "<code>", line 2', "y = x / 0", "ZeroDivisionError: division by zero"]),
        ("print('before')\n\nundefined", ["before\n", "line 3", "NameError"]),
        ("def f():\n    raise KeyError('k')\nf()", ["line 3", "line 2, in f", "KeyError: 'k'"]),
        ("x = (1,\nprint(", ["SyntaxError", "line"]),
        ("def f(): f()\nf()", ["RecursionError"]),
        ("input()", ["EOFError"]),
        ("import sys\nsys.exit('gave up')", ["gave up"]),
        ("import sys\nsys.exit(3)", ["exit status 3"]),
        ("import os\nprint('so far')\nos.abort()", ["so far", "SIGABRT"]),
        ("a\x00b", ["null bytes"]),
        ("\ud800", ["surrogates not allowed"]),
        ("raise ValueError('x' * 100_000)", ["...", "xxx"]),
        ("raise BaseException('base')", ["BaseException: base"]),
        ("import not_a_module", ["ModuleNotFoundError", "not_a_module"]),
    ],
)
def test_errors_name_exception_and_line(code: str, pieces: list[str]) -> None:
    text = error(code)
    assert all(piece in text for piece in pieces), text
    assert len(text) < 3000
    assert "_RUNNER" not in text and 'File "<string>"' not in text


def test_memory_is_limited() -> None:
    assert "MemoryError" in error("x = bytearray(2 * 1024**3)")


def test_files_are_limited() -> None:
    assert "File too large" in error(
        "with open('big', 'wb') as f:\n    f.truncate(1)\n    f.seek(10**9)\n    f.write(b'x')"
    )


@pytest.mark.parametrize("code", ["while True: print('x' * 1000)", "print('x' * 10_000_000)", "print('é' * 40_000)"])
def test_output_is_cut_and_the_program_stopped(code: str) -> None:
    text = run(code)
    assert MAX_OUTPUT - 10 < len(text.encode()) < MAX_OUTPUT + 100
    assert text.endswith("more than 65536 bytes]")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_not_piled_up_in_memory(stream: str) -> None:
    code = f"import sys\nfor _ in range(200): sys.{stream}.write('e' * 100_000)\nraise ValueError('end')"
    tracemalloc.start()
    try:
        if stream == "stdout":
            run(code)
        else:
            assert "ValueError: end" in error(code)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_the_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert run("import os, sys\nprint('OPENAI_API_KEY' in os.environ, '/somewhere' in sys.path)") == "False False"


def test_each_call_has_its_own_folder() -> None:
    assert run("import os\nopen('a', 'w').close()\nprint(os.listdir())") == "['a']"
    assert run("import os\nos.mkdir('d')\nos.chmod('d', 0)\nprint(os.listdir())") == "['d']"


LEAVE_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({path!r}, "w").write(str(child.pid))
print("started", flush=True)
{then}
"""


def read_pid(path: Path) -> int:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())


def test_what_a_program_leaves_running_is_ended(tmp_path: Path) -> None:
    code = LEAVE_A_CHILD.format(path=str(tmp_path / "pid"), then="")
    assert run(code) == "started"
    wait_until_dead(read_pid(tmp_path / "pid"))


def test_timeout_ends_the_whole_group(tmp_path: Path) -> None:
    code = LEAVE_A_CHILD.format(path=str(tmp_path / "pid"), then="time.sleep(600)")
    text = error(code, seconds=3.0)
    assert "started" in text and "stopped after 3 s" in text
    wait_until_dead(read_pid(tmp_path / "pid"))


def test_cancellation_ends_the_whole_group(tmp_path: Path) -> None:
    code = LEAVE_A_CHILD.format(path=str(tmp_path / "pid"), then="import os\nprint(os.getpid())\ntime.sleep(600)")

    async def cancelled() -> None:
        session = await python.open(ToolContext(Sample("s", (), "x"), {}))
        call = asyncio.ensure_future(session.call({"code": code}))
        await asyncio.to_thread(read_pid, tmp_path / "pid")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await session.close()

    asyncio.run(cancelled())
    wait_until_dead(read_pid(tmp_path / "pid"))


def test_cancellation_while_starting_leaves_nothing() -> None:
    async def cancelled() -> None:
        for delay in (0, 0, 0.001, 0.005, 0.01, 0.02):
            call = asyncio.ensure_future(run_python("import time; time.sleep(600)"))
            await asyncio.sleep(delay)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(cancelled())
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert [child for child in children if b"-P" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\x00")] == []


def test_a_process_that_leaves_its_session_does_not_hold_the_call(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    open({str(path)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        f"while not os.path.exists({str(path)!r}): time.sleep(0.01)\n"
        "print('parent')"
    )
    try:
        assert run(code, seconds=60.0) == "parent"
    finally:
        os.kill(read_pid(path), 9)  # documented: limits, not isolation


def test_many_at_once() -> None:
    async def many() -> list[str]:
        return await asyncio.gather(*(run_python(f"print({number})") for number in range(12)))

    assert asyncio.run(many()) == [str(number) for number in range(12)]


def test_the_tool_tells_the_model_what_it_takes() -> None:
    function = python.schema["function"]
    assert python.name == function["name"] == "python"
    assert function["description"] == "Run Python code and return what it prints."
    validate(python, {"code": "1"})
    for bad in ({}, {"code": 1}):
        with pytest.raises(ToolError, match="code"):
            validate(python, bad)

    async def call() -> str:
        session = await PythonTool().open(ToolContext(Sample("s", (), "x"), {}))
        return (await session.call({"code": "1 + 1"})).text

    assert asyncio.run(call()) == "2"
