"""The tests of a code sample, as verl's data has them, and the comparison of what came out with what should."""

import ast
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from turnwise.errors import DataError
from turnwise.scoring.service import ReadTruth
from turnwise.types import Sample

MAX_VALUE = 100_000
"""Characters of a value that a function under test may return."""


@dataclass(frozen=True, slots=True)
class ScriptCase:
    """A program reads this and prints that: `ScriptCase("1 2\\n", "3\\n")`."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CallCase:
    """A function called with these returns that: `CallCase("add", (1, 2), 3)`."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True, slots=True)
class AssertCase:
    """Statements that raise nothing: `AssertCase("assert add(1, 2) == 3")`."""

    source: str


Case = ScriptCase | CallCase | AssertCase


def truth_reader(_options: Mapping[str, Any]) -> ReadTruth:
    """Cases are needed whatever the options are."""
    return some_cases


def some_cases(sample: Sample) -> None:
    """DataError for a sample without tests; thousands of them in one sample are read when they are needed."""
    if not sample.ground_truth:
        cases_of(sample)


def cases_of(sample: Sample) -> list[Case]:
    """The tests in a ground truth: {inputs, outputs[, fn_name]} and {assert_case}, also as JSON text."""
    truth: Any = sample.ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            _refuse(sample, f"not JSON: {error}")
    if not isinstance(truth, Mapping):
        _refuse(sample, "not a mapping")
    inputs, outputs, function = truth.get("inputs") or [], truth.get("outputs") or [], truth.get("fn_name")
    asserts = truth.get("assert_case") or []
    asserts = [asserts] if isinstance(asserts, str) else asserts
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        _refuse(sample, "inputs and outputs are not two lists of one length")
    cases: list[Case] = []
    for case_input, wanted in zip(inputs, outputs, strict=True):
        if function is not None:
            cases.append(CallCase(_name(sample, function), _arguments(sample, case_input), _json(wanted)))
        else:
            cases.append(ScriptCase(_lines(sample, case_input), _lines(sample, wanted)))
    if not isinstance(asserts, list) or not all(
        isinstance(statement, str) and _parses(statement) for statement in asserts
    ):
        _refuse(sample, "assert_case is not a list of Python statements")
    cases += [AssertCase(statement) for statement in asserts]
    if not cases:
        _refuse(sample, "no test in it")
    return cases


def same_output(printed: str, wanted: str, tolerance: float) -> bool:
    """Whether two outputs say the same: space at the end of lines and of the whole is free, decimals may differ."""
    left, right = _rows(printed), _rows(wanted)
    if left == right:
        return True
    if len(left) != len(right) or not tolerance:
        return False
    return all(_same_row(first.split(), second.split(), tolerance) for first, second in zip(left, right, strict=True))


def same_value(value_found: Any, wanted: Any, tolerance: float) -> bool:
    """Whether a returned value is the wanted one; JSON knows no tuples, and decimals may differ."""
    if isinstance(value_found, list | tuple) and isinstance(wanted, list | tuple):
        pairs = zip(value_found, wanted, strict=False)
        return len(value_found) == len(wanted) and all(same_value(first, second, tolerance) for first, second in pairs)
    if isinstance(value_found, dict) and isinstance(wanted, dict):
        named = {str(key): value for key, value in value_found.items()}
        return named.keys() == {str(key) for key in wanted} and all(
            same_value(named[str(key)], value, tolerance) for key, value in wanted.items()
        )
    if isinstance(value_found, bool) or isinstance(wanted, bool):
        return value_found is wanted
    if isinstance(value_found, int | float) and isinstance(wanted, int | float):
        if isinstance(value_found, int) and isinstance(wanted, int):
            return value_found == wanted
        return _close(value_found, wanted, tolerance)
    return bool(type(value_found) is type(wanted) and value_found == wanted)


def literal(text: str) -> Any:
    """The plain value that a repr stands for; ValueError when it stands for something else."""
    if len(text) > MAX_VALUE:
        raise ValueError("too long")
    try:
        tree = ast.parse(text, mode="eval")
        return ast.literal_eval(_Floats().visit(tree))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


class _Floats(ast.NodeTransformer):
    """inf and nan have no literal of their own."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def _close(first: float, second: float, tolerance: float) -> bool:
    try:
        return first == second or math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond all floats
        return False


def _rows(text: str) -> list[str]:
    return [row.rstrip() for row in text.rstrip().split("\n")]


def _same_row(left: list[str], right: list[str], tolerance: float) -> bool:
    if len(left) != len(right):
        return False
    for first, second in zip(left, right, strict=True):
        if first != second and not ("." in first + second and _same_number(first, second, tolerance)):
            return False
    return True


def _same_number(first: str, second: str, tolerance: float) -> bool:
    try:
        return _close(float(first), float(second), tolerance)
    except ValueError:
        return False


def _name(sample: Sample, function: Any) -> str:
    if not isinstance(function, str) or not function.isidentifier():
        _refuse(sample, f"fn_name {function!r:.40} is not a name")
    return function


def _arguments(sample: Sample, raw: Any) -> tuple[Any, ...]:
    """A list of arguments, or one JSON value a line."""
    if isinstance(raw, list):
        return tuple(raw)
    try:
        return tuple(json.loads(line) for line in str(raw).split("\n") if line.strip())
    except ValueError as error:
        _refuse(sample, f"the arguments {raw!r:.40} are not JSON: {error}")


def _json(wanted: Any) -> Any:
    """The value a text stands for, or the text itself."""
    if not isinstance(wanted, str):
        return wanted
    try:
        return json.loads(wanted)
    except ValueError:
        return wanted


def _lines(sample: Sample, text: Any) -> str:
    """A text; some data has a list of lines."""
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        return "\n".join(text)
    if not isinstance(text, str):
        _refuse(sample, f"{text!r:.40} is neither a text nor a list of lines; calls need fn_name")
    return text


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def _refuse(sample: Sample, why: str) -> NoReturn:
    raise DataError(
        f"sample {sample.id!r}: the ground truth of {sample.data_source!r} must hold tests "
        f"({{inputs, outputs[, fn_name]}} or {{assert_case}}): {why}"
    )
