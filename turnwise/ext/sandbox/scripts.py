"""Scripts and notebooks in a session, as SandboxFusion runs them: with standard input, files in, files out.

The host opens no file of a session; whatever goes in or out does so through cells of its own.
"""

import asyncio
import base64
import binascii
from dataclasses import replace

from turnwise.ext.sandbox.http_schemas import (
    CellResult,
    CommandResult,
    CommandStatus,
    RunCodeAnswer,
    RunCodeRequest,
    RunJupyterAnswer,
    RunJupyterRequest,
    RunStatus,
)
from turnwise.ext.sandbox.limits import MIB, Limits
from turnwise.ext.sandbox.results import ExecutionStatus, Failure, Result, encode
from turnwise.ext.sandbox.session import Session

FILE_SECONDS = 10.0
PIECE = 480 * 1024
"""Bytes of a file given by one cell."""
MAX_FETCHED = 16 * MIB
"""Of the files of one request together."""
KILLED_CODE = -9

_WRITE = """
import base64, os
os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
with open(name, mode) as file:
    file.write(base64.b64decode(data))
"""
# Descriptor 0 is the text, because code reads sys.stdin, open(0) and os.read(0, n) alike. A session gives every call an
# empty sys.stdin; the one assignment that does so for the next call is let go by, and then sys is a plain module again.
_STDIN = """
import io, os, sys, types
file = open(name, "rb")
os.dup2(file.fileno(), 0)
file.close()
os.unlink(name)
class Once(types.ModuleType):
    def __setattr__(self, name, value):
        if name == "stdin":
            sys.__class__ = types.ModuleType
        else:
            types.ModuleType.__setattr__(self, name, value)
sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8")
sys.__class__ = Once
"""
_FOLDER = "import os, sys\nsys.stdout.write(os.getcwd())"
_READ = """
import base64, os, sys
path = os.path.join(folder, name)
if os.path.isfile(path):
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(count)
        sys.stdout.write(base64.b64encode(data).decode() + ("," if file.read(1) else "."))
"""


class _Refused(Exception):
    """The request cannot be carried out; the text is for the client."""


async def run_script(session: Session, request: RunCodeRequest, limits: Limits, most: float) -> RunCodeAnswer:
    """Run `code` once in a fresh session, for at most `most` seconds whatever the request says."""
    if request.language != "python":
        text = f"this server runs Python only, not {request.language[:40]!r}: send language='python'"
        return RunCodeAnswer(status=RunStatus.SandboxError, message=text)
    try:
        folder = await _prepare(session, request.files, bool(request.fetch_files))
        before = await _give_stdin(session, request.stdin or "")
    except _Refused as error:
        return RunCodeAnswer(status=RunStatus.SandboxError, message=str(error))
    # A script prints no last value: this makes it None.
    result = await session.run(f"{request.code}\nNone", min(request.run_timeout, most))
    result = _within(result, before, request.memory_limit_MB * MIB, limits)
    ran = _command(result)
    notes = [f"{name} was cut to {limits.output} characters" for name in _cut(result, limits)]
    files, missing = await _fetch(session, request.fetch_files, folder, result, limits)
    status = RunStatus.Success if ran.return_code == 0 else RunStatus.Failed
    return RunCodeAnswer(status=status, message="; ".join(notes + missing), run_result=ran, files=files)


async def run_notebook(session: Session, request: RunJupyterRequest, limits: Limits, most: float) -> RunJupyterAnswer:
    """Run cells one after the other; an exception ends its cell only, a time limit or a dead process ends them all."""
    try:
        folder = await _prepare(session, request.files, True)
    except _Refused as error:
        return RunJupyterAnswer(status=RunStatus.SandboxError, message=str(error))
    left = total = min(request.total_timeout, most)
    cells: list[CellResult] = []
    last = Result(ExecutionStatus.OK)
    for code in request.cells:
        last = await session.run(code, min(request.cell_timeout or left, left))
        cells.append(await _cell(last))
        left -= last.seconds
        if last.status is ExecutionStatus.TIMEOUT or not last.kept:
            break
        if left <= 0:
            last = replace(last, status=ExecutionStatus.TIMEOUT)
            break
    ended = last.status is ExecutionStatus.TIMEOUT or not last.kept
    driver = _command(last if ended else Result(ExecutionStatus.OK))
    driver = driver.model_copy(update={"execution_time": total - left, "stdout": "", "stderr": "; ".join(last.notices)})
    files, missing = await _fetch(session, request.fetch_files, folder, last, limits)
    status = RunStatus.Failed if ended else RunStatus.Success
    return RunJupyterAnswer(status=status, message="; ".join(missing), driver=driver, cells=cells, files=files)


async def _inside(session: Session, source: str, seconds: float = FILE_SECONDS, **names: object) -> Result:
    """Run our own code without leaving a name in the session."""
    return await session.run(f"exec({source!r}, {names!r})", seconds)


async def _prepare(session: Session, files: dict[str, bytes | None], fetching: bool) -> str:
    """Write the files; the folder they are in, if it will be asked for."""
    for name, content in files.items():
        if content is not None:
            await _give(session, name, content)
    return (await _inside(session, _FOLDER)).stdout if fetching else ""


async def _give(session: Session, name: str, content: bytes) -> None:
    for start in range(0, len(content) or 1, PIECE):
        piece = encode(content[start : start + PIECE])
        result = await _inside(session, _WRITE, name=name, data=piece, mode="ab" if start else "wb")
        _check(result, f"the file {name[:200]!r} could not be written")


async def _give_stdin(session: Session, text: str) -> int:
    """Make `text` what the next call reads; the bytes resident before that call."""
    name = ".stdin"
    await _give(session, name, text.encode())
    result = await _inside(session, _STDIN, name=name)
    _check(result, "standard input could not be given")
    return result.peak_memory


def _check(result: Result, what: str) -> None:
    if result.status is not ExecutionStatus.OK:
        reason = f"{result.failure.kind}: {result.failure.message}" if result.failure else "; ".join(result.notices)
        raise _Refused(f"{what}: {reason[:300]}")


def _within(result: Result, before: int, memory: int, limits: Limits) -> Result:
    """The result under a lower memory limit than the session's own, which can only be judged afterwards."""
    if (
        not 0 < memory < limits.memory
        or result.peak_memory - before <= memory
        or result.status is not ExecutionStatus.OK
    ):
        return result
    text = f"the code used {(result.peak_memory - before) // MIB} MB, more than the {memory // MIB} MB it was given"
    failure = Failure("MemoryError", text, None, None, f"MemoryError: {text}")
    return replace(result, status=ExecutionStatus.MEMORY, failure=failure)


def _cut(result: Result, limits: Limits) -> list[str]:
    texts = {"stdout": result.stdout, "stderr": result.stderr}
    return [name for name, text in texts.items() if len(text) > limits.output]


def _command(result: Result) -> CommandResult:
    """A result as a process that ended: what Python would have written to stderr, and the exit status."""
    parts = [result.stderr]
    code: int | None = 0 if result.status is ExecutionStatus.OK else 1
    if result.failure is not None and result.failure.kind == "SystemExit":
        message = result.failure.message
        number = message.lstrip("-").isdecimal() and len(message) < 10
        code = int(message) & 0xFF if number else 1
        parts += [] if number else [message]
    elif result.failure is not None:
        parts.append(result.failure.traceback)
    if result.status is not ExecutionStatus.OK:
        parts += [f"[{notice}]" for notice in result.notices]
    if result.status is ExecutionStatus.KILLED:
        code = KILLED_CODE
    status = CommandStatus.Finished
    if result.status is ExecutionStatus.TIMEOUT:
        status, code = CommandStatus.TimeLimitExceeded, None
    stderr = "".join(part if part.endswith("\n") else f"{part}\n" for part in parts if part)
    return CommandResult(
        status=status, execution_time=result.seconds, return_code=code, stdout=result.stdout, stderr=stderr
    )


async def _cell(result: Result) -> CellResult:
    display: list[dict[str, object]] = []
    for picture in result.images:
        png = await asyncio.to_thread(picture.png)
        display.append({"image/png": encode(png), "text/plain": f"<{picture.name}: {picture.size} {picture.mode}>"})
    if result.value is not None:
        display.append({"text/plain": result.value})
    error: list[dict[str, object]] = []
    if result.failure is not None:
        lines = result.failure.traceback.splitlines()
        error.append({"ename": result.failure.kind, "evalue": result.failure.message, "traceback": lines})
    elif result.status is not ExecutionStatus.OK:
        text = "; ".join(result.notices)
        error.append({"ename": result.status.value, "evalue": text, "traceback": [text]})
    return CellResult(stdout=result.stdout, stderr=result.stderr, display=display, error=error)


async def _fetch(
    session: Session, names: list[str], folder: str, result: Result, limits: Limits
) -> tuple[dict[str, bytes], list[str]]:
    """(files, what is missing and why). A file that is not there is left out without a word, as SandboxFusion does."""
    if not result.kept:
        return {}, ["the files were lost with the process"] if names else []
    files: dict[str, bytes] = {}
    missing: list[str] = []
    room = MAX_FETCHED
    for name in names:
        try:
            content = await _take(session, name, folder, room, limits)
        except _Refused as error:
            missing.append(f"the file {name[:200]!r} was not fetched: {error}")
            continue
        if content is not None:
            files[name] = content
            room -= len(content)
    return files, missing


async def _take(session: Session, name: str, folder: str, room: int, limits: Limits) -> bytes | None:
    """The content of a regular file, piece by piece, because a call gives back only so much text."""
    count = (min(limits.output, PIECE) - 1) // 4 * 3
    content = bytearray()
    while True:
        result = await _inside(session, _READ, folder=folder, name=name, start=len(content), count=count)
        _check(result, "it could not be read")
        text = result.stdout
        if not text and not content:
            return None
        try:
            piece = base64.b64decode(text[:-1], validate=True)
        except (binascii.Error, ValueError) as error:
            raise _Refused("the session answered something else") from error
        if text[-1:] not in (",", ".") or (text[-1] == "," and not piece):
            raise _Refused("the session answered something else")
        content += piece
        if len(content) > room:
            raise _Refused(f"more than {MAX_FETCHED} bytes in all")
        if text[-1] == ".":
            return bytes(content)
