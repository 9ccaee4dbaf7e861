"""The `python` tool: each call runs its code in a fresh interpreter with limits on time, memory and output.

These are limits, not isolation: the code runs as the user who runs Turnwise and can read and write what that user can,
use the network, and start a process that leaves its session. A sandbox can replace the inside behind the same tool.
"""

import asyncio
import contextlib
import os
import signal
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from typing import Any, cast

from turnwise.errors import EpisodeError, ToolError
from turnwise.rollout.tools.tool import ToolContext, ToolSession
from turnwise.types import JsonSchema, ToolResult

MAX_OUTPUT = 64 * 1024
MAX_TRACEBACK = 2000
MEMORY = 512 * 1024 * 1024
MAX_FILE = 64 * 1024 * 1024
CPU_SECONDS = 600
"""Not the time limit, which is the tool's timeout: this ends a program whose Turnwise was killed."""
LINGER_SECONDS = 1.0
"""How long output is awaited from processes that outlive the program and left its process group."""

_FLAGS = ("-P", "-s", "-S", "-B", "-X", "utf8")
# -S saves a third of the start-up time; what it leaves out and programs use is made up for in the runner. No -E or -I:
# the environment is ours, and a fixed hash seed makes the order of sets the same when a trajectory is replayed.
_RUNNER = r"""
def run():
    import builtins, io, os, resource, sys
    limits = ((resource.RLIMIT_AS, %(memory)d), (resource.RLIMIT_CPU, %(cpu)d),
              (resource.RLIMIT_FSIZE, %(file)d), (resource.RLIMIT_CORE, 0))
    for kind, wanted in limits:
        hard = resource.getrlimit(kind)[1]
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (limit, limit))
    source = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path += %(packages)r
    sys.argv[:] = ["<code>"]
    builtins.exit = builtins.quit = sys.exit

    class Output(io.TextIOWrapper):
        printed = False
        def write(self, text):
            Output.printed = True
            del Output.write  # only the first print needs watching
            return super().write(text)

    sys.stdout = sys.__stdout__ = Output(sys.stdout.detach(), "utf-8", "backslashreplace", line_buffering=True)
    main = sys.modules["__main__"].__dict__
    del main["run"]
    try:
        tree = compile(source, "<code>", "exec", 0x400)  # ast.PyCF_ONLY_AST, without the cost of importing ast
        last = tree.body.pop() if tree.body and type(tree.body[-1]).__name__ == "Expr" else None
        exec(compile(tree, "<code>", "exec"), main)
        if last is not None:
            wrapper = compile("0", "<code>", "eval", 0x400)
            wrapper.body = last.value
            value = eval(compile(wrapper, "<code>", "eval"), main)
            if value is not None and not Output.printed:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        import linecache, traceback
        linecache.cache["<code>"] = (len(source), None, source.splitlines(True), "<code>")
        frames = error.__traceback__.tb_next  # ours is the first
        text = "".join(traceback.format_exception(type(error), error, frames, limit=-6))
        sys.stdout.flush()
        sys.stderr.write("\n" + text)
        sys.stderr.flush()
        os._exit(1)
run()
"""


@dataclass(slots=True)
class PythonTool:
    """Stateless: nothing a program leaves behind is seen by the next."""

    name: str = "python"
    timeout: float = 30.0
    concurrency: int = 2 * (os.cpu_count() or 1)
    schema: JsonSchema = field(
        default_factory=lambda: {
            "type": "function",
            "function": {
                "name": "python",
                "description": "Run Python code and return what it prints.",
                "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
            },
        }
    )

    async def open(self, context: ToolContext) -> ToolSession:
        return _PythonSession()


@dataclass(slots=True)
class _PythonSession:
    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(await run_python(arguments["code"]))

    async def close(self) -> None:
        return None


python = PythonTool()


async def run_python(code: str, seconds: float | None = None) -> str:
    """What the code prints, or the value of a last expression when it prints nothing.

    ToolError carries what was printed and the end of the traceback. The caller's cancellation, or `seconds`, kills the
    program and all its children that stayed in its process group.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="turnwise-python-", ignore_cleanup_errors=True)
    except OSError as error:
        raise EpisodeError(f"cannot make a folder for a Python program: {error}") from error
    try:
        return await _run_in(folder.name, code, seconds)
    finally:
        # In a thread: a program may leave any number of files. Errors are ignored because a process that left its
        # session may still write there.
        await asyncio.to_thread(folder.cleanup)


async def _run_in(folder: str, code: str, seconds: float | None) -> str:
    loop = asyncio.get_running_loop()
    try:
        transport, program = await loop.subprocess_exec(
            _Program,
            sys.executable,
            *_FLAGS,
            "-c",
            _runner(),
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
    except OSError as error:
        raise EpisodeError(f"cannot start Python: {error}") from error
    try:
        stdin = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
        stdin.write(code.encode("utf-8", "surrogatepass"))
        stdin.close()
        try:
            async with asyncio.timeout(seconds):
                await program.exited.wait()
        except TimeoutError as error:
            raise ToolError(program.text(f"[stopped after {seconds:g} s]")) from error
        program.kill()  # what it left running in its group
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(program.closed.wait(), LINGER_SECONDS)
    finally:
        program.kill()
        await program.exited.wait()
        transport.close()
    return _result(program, transport.get_returncode())


def _result(program: "_Program", status: int | None) -> str:
    if program.overflow:
        return program.text(f"[stopped: it printed more than {MAX_OUTPUT} bytes]")
    if status == 0:
        return program.text() or "(no output)"
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        reason = f"killed by {name}" + (f" after {CPU_SECONDS} s of CPU time" if name == "SIGXCPU" else "")
        raise ToolError(program.text(f"[{reason}]"))
    complaint = program.complaint()
    raise ToolError(program.text(complaint or f"[it ended with exit status {status}]"))


class _Program(asyncio.SubprocessProtocol):
    """Collects output up to its limit. `exited` is set by the child watcher, `closed` when the pipes have ended too."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()
        self.overflow = False
        self._group: int | None = None
        self._output = bytearray()
        self._errors = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._group = cast(asyncio.SubprocessTransport, transport).get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:  # only its end is wanted
            self._errors += data
            del self._errors[: -4 * MAX_TRACEBACK]
            return
        self._output += data[: MAX_OUTPUT + 1 - len(self._output)]
        if len(self._output) > MAX_OUTPUT:
            self.overflow = True
            self.kill()

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def kill(self) -> None:
        """End the whole process group, once: its number may belong to others later. A group that is gone is fine."""
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
            self._group = None

    def text(self, note: str = "") -> str:
        """What was printed, and a note."""
        output = bytes(self._output[:MAX_OUTPUT]).decode("utf-8", "replace").rstrip("\n")
        return f"{output}\n{note}" if output and note else output or note

    def complaint(self) -> str:
        """The last lines of the traceback, or what else stands at the end of standard error."""
        text = bytes(self._errors).decode("utf-8", "replace").strip("\n")
        if len(text) <= MAX_TRACEBACK:
            return text
        tail = text[-MAX_TRACEBACK:]
        return "..." + (tail[tail.index("\n") :] if "\n" in tail else tail)


def _runner() -> str:
    paths = sysconfig.get_paths()
    packages = list(dict.fromkeys((paths["purelib"], paths["platlib"])))
    return _RUNNER % {"memory": MEMORY, "cpu": CPU_SECONDS, "file": MAX_FILE, "packages": packages}


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours, keys above all; one thread each, or numpy's thread pool alone would pass the memory limit."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    library = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # Python may need it
    places = {"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    return threads | library | places
