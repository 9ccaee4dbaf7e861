"""Errors that the code under test may make vanish, as a context manager can, and assertions that it may not."""

import ast
import linecache
from types import FrameType

_RUNNERS = frozenset({"unittest", "_pytest"})
_BLOCKS = (ast.With, ast.AsyncWith)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def is_verdict(error: BaseException) -> bool:
    """Whether a test's own assertion failed, or its runner raised; not an error of the code under test."""
    is_runners = type(error).__module__.partition(".")[0] in _RUNNERS
    return (isinstance(error, AssertionError) or is_runners) and "_far_at" not in vars(error)


def may_swallow(error: BaseException, leaving: FrameType) -> bool:
    """Whether a test may go on after the `with` that it leaves by an error: not if that skipped an assertion."""
    frame: FrameType | None = leaving
    while frame is not None and not _is_held(frame):  # contextlib's, where blocks are left together
        frame = frame.f_back
    if is_verdict(error):
        return False
    step = error.__traceback__
    while step is not None:
        if step.tb_frame is frame and _skips(frame, step.tb_lineno, _BLOCKS, frame.f_lineno):
            return False
        if step.tb_frame is not frame and _is_held(step.tb_frame) and _skips(step.tb_frame, step.tb_lineno, _FUNCTIONS):
            return False
        step = step.tb_next
    return True


def _is_held(frame: FrameType) -> bool:
    """Whether it runs a test's file: only those are known by their text and not by their time."""
    entry = linecache.cache.get(frame.f_code.co_filename)
    return entry is not None and len(entry) == 4 and entry[1] is None


def _skips(frame: FrameType, line: int, kinds: tuple[type[ast.AST], ...], start: int | None = None) -> bool:
    """Whether a block or function around a line, the one that starts at `start` or the innermost, asserts after it."""
    tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    around = [node for node in ast.walk(tree) if isinstance(node, kinds) and _first(node) <= line <= _last(node)]
    chosen = [node for node in around if _first(node) == start] or around[-1:]
    return any(_last(node) >= line and _asserts(node) for block in chosen for node in ast.walk(block))


def _first(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def _last(node: ast.AST) -> int:
    return int(getattr(node, "end_lineno", 0))


def _asserts(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return isinstance(node, ast.Assert) or name.startswith("assert")
