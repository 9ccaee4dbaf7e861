"""Errors that the code under test may make vanish, as a context manager can, and assertions that it may not."""

import ast
import linecache
from types import FrameType

_RUNNERS = frozenset({"unittest", "_pytest"})


def is_verdict(error: BaseException) -> bool:
    """Whether a test's own assertion failed, or its runner raised; not an error of the code under test."""
    is_runners = type(error).__module__.partition(".")[0] in _RUNNERS
    return (isinstance(error, AssertionError) or is_runners) and "_far_at" not in vars(error)


def may_swallow(error: BaseException, frame: FrameType) -> bool:
    """Whether the `with` that `frame` leaves by an error may go on after it: not if it skipped an assertion."""
    if is_verdict(error):
        return False
    step = error.__traceback__
    while step is not None and step.tb_frame is not frame:
        step = step.tb_next
    if step is None:
        return True
    tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    blocks = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.With) and node.lineno <= step.tb_lineno <= (node.end_lineno or 0)
    ]  # fmt: skip
    left = [node for node in blocks if node.lineno == frame.f_lineno] or blocks[-1:]
    return not any(_asserts(node, step.tb_lineno) for block in left for node in ast.walk(block))


def _asserts(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.Assert):
        return (node.end_lineno or 0) >= line
    called = node.func if isinstance(node, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name.startswith("assert") and (getattr(node, "end_lineno", None) or 0) >= line
