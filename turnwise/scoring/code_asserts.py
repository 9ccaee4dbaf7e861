"""Assertions about functions that a policy wrote, checked where its code never ran.

The statements run in a clean session in which the functions are stand-ins. A stand-in that is called with something
new stops the run; the host has the call made in the policy's session and starts over with the result. So the policy's
code never sees what is expected, and cannot change what comparing means: only plain values cross.
"""

import ast

from turnwise.errors import DataError
from turnwise.sandbox.results import Result, Status
from turnwise.sandbox.session import Session
from turnwise.scoring.code_cases import literal

MAX_CALLS = 200
"""Of functions under test by one assertion case."""
MAX_CODE = 100_000
"""Characters of a program whose functions are looked for."""
_CLEAN = """
import builtins
class Ask(BaseException):
    pass
def stand_in(name):
    def call(*args, **kwargs):
        key = repr((name, args, kwargs))
        if key not in known:
            raise Ask(key)
        raised, text = known[key]
        if raised:
            kind = getattr(builtins, text, None)
            known_kind = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if known_kind else RuntimeError)("raised by the function under test")
        return eval(text, {"inf": float("inf"), "nan": float("nan")})
    return call
space = {"__name__": "__main__", **{name: stand_in(name) for name in names}}
try:
    exec(compile(test, "<test>", "exec"), space)
    outcome = "passed"
except Ask as error:
    outcome = "ask" + error.args[0]
except BaseException as error:
    outcome = "failed"
"""


def functions_in(code: str) -> list[str]:
    """The functions a program defines at its top level; none when it does not parse or is far too long."""
    if len(code) > MAX_CODE:
        return []
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return sorted({node.name for node in body if isinstance(node, ast.FunctionDef)})


def call_source(function: str, args: str, kwargs: str = "{}") -> str:
    """A cell whose value is what the function returns; an array becomes a list."""
    known = "{'inf': float('inf'), 'nan': float('nan')}"  # a repr may hold these
    called = f"({function})(*eval({args!r}, {known}), **eval({kwargs!r}, {known}))"
    return f"(lambda value: value.tolist() if type(value).__module__ == 'numpy' else value)({called})"


async def holds(source: str, functions: list[str], theirs: Session, clean: Session, seconds: float) -> bool:
    """Whether the statements raise nothing. `theirs` has run the policy's code, `clean` never runs any of it."""
    known: dict[str, tuple[bool, str]] = {}
    left = seconds  # of all calls together
    for _ in range(MAX_CALLS):
        cell = f"known, names, test = {known!r}, {functions!r}, {source!r}\n{_CLEAN}\noutcome"
        outcome = _outcome(await clean.run(cell, seconds))
        if not outcome.startswith("ask"):
            return outcome == "passed"
        key = outcome.removeprefix("ask")
        try:
            name, args, kwargs = literal(key)
        except ValueError as error:
            if known:  # perhaps made of what the functions returned, which may be anything
                return False
            raise DataError(f"an assert_case calls a function with what is no plain value: {key[:120]}") from error
        result = await theirs.run(call_source(name, repr(args), repr(kwargs)), left)
        left -= result.seconds
        answer = _read(result)
        if answer is None or left <= 0:
            return False
        known[key] = answer
    return False


def _outcome(result: Result) -> str:
    """What the clean session found; "failed" when the statements took too long, or too much, with the values given."""
    try:
        return str(literal(result.value or "")) if result.status is Status.OK else "failed"
    except ValueError:  # a text so long that its middle was left out
        return "failed"


def _read(result: Result) -> tuple[bool, str] | None:
    """(raised?, the value or the exception's name); None when nothing of use came back."""
    if result.status is Status.ERROR and result.failure is not None:
        return True, result.failure.kind
    if result.status is not Status.OK:
        return None
    text = "None" if result.value is None else result.value
    try:
        literal(text)
    except ValueError:
        return None
    return False, text
