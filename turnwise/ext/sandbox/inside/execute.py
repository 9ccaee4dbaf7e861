"""Runs the code of one call: compile, run, take the last expression, and describe what went wrong."""

import builtins
import linecache
import sys
from _signal import SIGINT, signal  # type: ignore[import-not-found]  # the compiled part: it needs no builtins
from ast import AST, Expr, Expression, Module
from collections.abc import Callable
from contextlib import suppress
from errno import EACCES, EPERM, EROFS
from gc import collect
from io import StringIO
from socket import gaierror
from sys import getrecursionlimit, setprofile, setrecursionlimit, settrace
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

from turnwise.ext.sandbox.inside.capture import cut

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules

AST_ONLY = 0x400
"""ast.PyCF_ONLY_AST"""
KEPT_CELLS = 16
KEPT_CHARACTERS = 1_000_000
"""Of the sources of earlier cells together."""
FRAMES = 6
CHAIN = 4
"""Exceptions of one traceback: the one that was raised and those it came from."""
MESSAGE = 2_000
TRACEBACK = 4_000
OWN_DEPTH = 200
"""Of our own calls, which the code could make impossible by a low recursion limit."""
REFUSED = {EPERM, EACCES, EROFS}


class TimeLimit(KeyboardInterrupt):
    """The host's SIGINT, raised in the code at the time limit."""


class Alarm:
    """Turns SIGINT into an exception, only while code of the session runs, and once per call.

    The signal can come at any instruction. Between calls it is ignored; after `begin` and outside of `guard` it is
    remembered; inside of `guard` it is raised. Raising disarms, so that the second handler in `guard` is enough.
    """

    __slots__ = ("_armed", "_in_call", "stopped")

    def __init__(self) -> None:
        self._armed = False
        self._in_call = False
        self.stopped = False

    def begin(self) -> None:
        """A call starts. The handler is set again each time, because code may have replaced it."""
        self.stopped = False
        signal(SIGINT, self._handle)
        self._in_call = True

    def end(self) -> None:
        """The call is over: a signal that comes now has nothing to stop."""
        self._in_call = False

    def _handle(self, number: int, frame: object) -> None:
        if not self._in_call:
            return
        self.stopped = True
        if self._armed:
            self._armed = False
            raise TimeLimit("stopped at the time limit")

    def guard(self, work: Callable[[], None], late: bool = False) -> BaseException | None:
        """Run code that may do anything; what it raised. `late` work is done even when the call was stopped before."""
        try:
            try:
                self._armed = True
                if self.stopped and not late:
                    self._armed = False
                    raise TimeLimit("stopped at the time limit")
                work()
                self._armed = False
            except BaseException as error:
                self._armed = False
                setprofile(None)
                settrace(None)
                keep_depth()
                return error
            # What would get in the way of our own code is undone by calls that a trace function does not see.
            setprofile(None)
            settrace(None)
            keep_depth()
        except BaseException as error:  # the signal, while another exception was being caught; or a profile function's
            return error
        return None


def keep_depth() -> None:
    """Room for our own calls, whatever limit the code set."""
    if getrecursionlimit() < OWN_DEPTH:
        setrecursionlimit(OWN_DEPTH)


class Cells:
    """The sources of the last cells, by file name, for tracebacks of ours and of the code itself."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}
        self._sizes: dict[str, int] = {}
        self._cache = linecache.cache

    def add(self, name: str, code: str) -> None:
        """Keep a source, and drop the oldest ones."""
        lines = list(StringIO(code, newline=None))  # the ends of lines that the parser knows, and no others
        self._lines[name] = lines
        self._sizes[name] = len(code)
        if len(code) <= KEPT_CHARACTERS:
            self._cache[name] = (len(code), None, lines, name)
        while len(self._lines) > KEPT_CELLS or (len(self._lines) > 1 and sum(self._sizes.values()) > KEPT_CHARACTERS):
            oldest = next(iter(self._lines))
            del self._lines[oldest], self._sizes[oldest]
            self._cache.pop(oldest, None)

    def line(self, name: str, number: int | None) -> str | None:
        """A line without its indentation; None when it is not known any more."""
        lines = self._lines.get(name)
        if lines is None or number is None or not 0 < number <= len(lines):
            return None
        return cut(lines[number - 1].strip(), 400)


class CompiledCell(NamedTuple):
    """The code of one call: its statements, and the expression at their end, whose value it has."""

    body: CodeType | None
    last: CodeType | None


class Interpreter:
    """One namespace, which lives as long as the session."""

    def __init__(self) -> None:
        self.module = ModuleType("__main__")
        self.namespace = self.module.__dict__
        self.namespace["__builtins__"] = builtins
        self.cells = Cells()
        self.alarm = Alarm()
        self._count = 0
        self.cell = ""

    def begin(self, code: str) -> None:
        """A new cell; the modules that the code may have replaced are put back."""
        self._count += 1
        self.cell = f"<cell {self._count}>"
        self.cells.add(self.cell, code)
        sys.modules["__main__"] = self.module

    def compiled(self, code: str) -> CompiledCell:
        """What is to be run of a cell."""
        tree = compile(code, self.cell, "exec", AST_ONLY, True)
        last = self._take_last(tree)
        body = self._compiled(tree, "exec") if tree.body else None
        return CompiledCell(body, None if last is None else self._compiled(Expression(last.value), "eval"))

    def run(self, cell: CompiledCell) -> Any:
        """Run a cell; the value of its last expression."""
        if cell.body is not None:
            exec(cell.body, self.namespace)
        return None if cell.last is None else eval(cell.last, self.namespace)

    def _take_last(self, tree: Module) -> Expr | None:
        if tree.body and isinstance(tree.body[-1], Expr):
            last = tree.body.pop()
            assert isinstance(last, Expr)
            return last
        return None

    def _compiled(self, tree: AST, mode: str) -> CodeType:
        return compile(tree, self.cell, mode, 0, True)  # type: ignore[call-overload, no-any-return]


def text_of(error: BaseException) -> tuple[str, str]:
    """(name, message) of an exception, both of which may be the code's own making."""
    try:
        kind = cut(str(type(error).__name__), 200)
    except TimeLimit:
        raise
    except BaseException:
        kind = "BaseException"
    try:
        message = cut(str(error.msg if isinstance(error, SyntaxError) else error), MESSAGE)
    except TimeLimit:
        raise
    except BaseException as fault:
        message = f"<str() of the exception raised {type(fault).__name__}>"
    return kind, message


def frames_of(error: BaseException) -> list[tuple[str, int, str]]:
    """(cell, line, function) of the frames of cells, outermost first."""
    frames = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith("<cell "):
            frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames


def describe(error: BaseException, interpreter: Interpreter) -> dict[str, Any]:
    """The failure of a call, as it goes to the host."""
    cells, cell = interpreter.cells, interpreter.cell
    kind, message = text_of(error)
    line: int | None = None
    source: str | None = None
    for name, number, _ in frames_of(error):
        if name == cell:
            line, source = number, cells.line(name, number)
    if isinstance(error, SyntaxError) and error.filename == cell:
        line = error.lineno if isinstance(error.lineno, int) else None
        source = cells.line(cell, line)
    if line is not None and source is None:
        source = ""
    text = "\n".join(section(error, cells, 0, set()))
    return {
        "kind": kind,
        "message": message,
        "line": line,
        "source": source,
        "traceback": cut(text, TRACEBACK),
    }


def section(error: BaseException, cells: Cells, depth: int, visited: set[int]) -> list[str]:
    """Lines of a traceback, what the exception came from first."""
    visited.add(id(error))
    lines: list[str] = []
    cause, context = error.__cause__, error.__context__
    origin = cause if cause is not None else None if error.__suppress_context__ else context
    if origin is not None and id(origin) not in visited and depth + 1 < CHAIN:
        lines += section(origin, cells, depth + 1, visited)
        how = "caused the next one" if cause is not None else "was being handled when the next one came"
        lines += ["", f"The exception above {how}:", ""]
    frames = frames_of(error)
    if frames:
        lines.append("Traceback (most recent call last):")
    left_out = len(frames) - FRAMES
    for index, (name, number, function) in enumerate(frames):
        if left_out > 0 and 2 <= index < 2 + left_out:
            if index == 2:
                lines.append(f"  [{left_out} frames left out]")
            continue
        lines.append(f'  File "{name}", line {number}, in {function}')
        source = cells.line(name, number)
        if source:
            lines.append(f"    {source}")
    lines += headline(error, cells)
    if isinstance(error, BaseExceptionGroup):
        lines += members(error, cells, depth, visited)
    return lines


def headline(error: BaseException, cells: Cells) -> list[str]:
    """The last lines of a traceback: where the syntax is wrong, the name and the message, and notes."""
    kind, message = text_of(error)
    lines = []
    if isinstance(error, SyntaxError) and isinstance(error.lineno, int):
        lines.append(f'  File "{cut(str(error.filename), 200)}", line {error.lineno}')
        source = cells.line(str(error.filename), error.lineno) or cut(str(error.text or "").strip(), 400)
        if source:
            lines.append(f"    {source}")
    module = getattr(type(error), "__module__", None)
    prefix = f"{module}." if isinstance(module, str) and module not in ("builtins", "__main__", __name__) else ""
    lines.append(f"{prefix}{kind}: {message}" if message else f"{prefix}{kind}")
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        lines += [cut(note, 400) for note in notes[:4] if isinstance(note, str)]
    return lines


def members(group: BaseExceptionGroup[BaseException], cells: Cells, depth: int, visited: set[int]) -> list[str]:
    """The exceptions of a group, indented; a few of them and not too deep."""
    lines = []
    for index, member in enumerate(group.exceptions[:CHAIN]):
        lines.append(f"  [{index + 1} of {len(group.exceptions)}]")
        if depth + 1 < CHAIN:
            lines += [f"  {line}" for line in section(member, cells, depth + 1, visited)]
    if len(group.exceptions) > CHAIN:
        lines.append(f"  [{len(group.exceptions) - CHAIN} more]")
    return lines


def refused(error: BaseException) -> bool:
    """Whether the sandbox denied something, and this is how the code ended."""
    current: BaseException | None = error
    for _ in range(16):
        if current is None:
            return False
        # Without a network no name can be resolved, whatever number the resolver gives for it.
        if isinstance(current, PermissionError | gaierror):
            return True
        if isinstance(current, OSError) and current.errno in REFUSED:
            return True
        wrapped = current.__context__ if isinstance(current, OSError) else None
        current = current.__cause__ or wrapped
    return False


def out_of_memory(error: BaseException) -> bool:
    """Whether a lack of memory is how the code ended; asks the exception itself nothing."""
    return issubclass(type(error), MemoryError)


def status_of(error: BaseException) -> str:
    """How the code ended. Exiting without a fault is no failure."""
    if isinstance(error, SystemExit) and (error.code is None or (isinstance(error.code, int) and not error.code)):
        return "ok"
    if out_of_memory(error):
        return "memory"
    return "denied" if refused(error) else "error"


def release(error: BaseException) -> None:
    """Give back what the frames of an exception hold, which may be most of the memory."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith("<cell "):
            with suppress(RuntimeError):  # still running: a generator that another frame holds
                trace.tb_frame.clear()
        trace = trace.tb_next
    error.__traceback__ = None
    error.__context__ = None
    collect()
