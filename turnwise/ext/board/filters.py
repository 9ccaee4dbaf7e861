"""A small language for choosing trajectories: `reward > 0 and right == false`, run over whole columns, never as Python.

Null (an unknown reward, no failure) compares false with everything, also with `!=`; `failure != null` asks for it. As
a condition a number means "not 0", a text "not empty", and null means no.
"""

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from turnwise.errors.nearest_name import unknown
from turnwise.ext.board.columns import GROUPED, KINDS, SPLITS, Array, ColumnKind, Pools, Snapshot, ValuePool
from turnwise.storage.index import COLUMNS

LONGEST = 2000
DEEPEST = 40
_MOST_NODES = 600
FIELDS = (*(name for name in COLUMNS if KINDS[name] is not ColumnKind.PARTS), "split", *GROUPED)
FUNCTIONS = {"abs": 1, "len": 1, "lower": 1, "contains": 2, "tool": 1}
"""How many arguments each takes."""
_PARTS = ("part", "parts")
_WORDS = {"true": 1.0, "false": 0.0, "null": None, "none": None}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Array, Array], Array]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
}


class BadFilter(ValueError):
    """An expression that cannot be used: what is right, and where (`column` from 1, `end` after what is wrong)."""

    def __init__(self, message: str, column: int | None = None, end: int | None = None) -> None:
        super().__init__(message if column is None else f"column {column}: {message}")
        self.message = message
        self.column = column
        self.end = end if column is None or (end is not None and end > column) else column + 1


class HasSnapshot(Protocol):
    """A Table, or a snapshot of one."""

    @property
    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter expression that was parsed and checked."""

    expression: str
    _tree: ast.expr
    _shift: int

    def mask(self, table: HasSnapshot) -> Array:
        """True for the rows it chooses; BadFilter for a reward part that no row has."""
        snapshot = table.snapshot
        truth = _Evaluation(snapshot, self.expression, self._shift).truth(self._tree)
        return np.broadcast_to(truth, (snapshot.size,)).copy()


def compile(expression: str) -> Filter:
    """Read an expression; BadFilter says what is wrong with it."""
    if len(expression) > LONGEST:
        raise BadFilter(f"a filter has at most {LONGEST} characters, not {len(expression)}")
    text = expression.replace("\n", " ").replace("\t", " ").rstrip()
    shift = len(text) - len(text.lstrip())
    _check_characters(text)
    try:
        tree = ast.parse(text.lstrip(), mode="eval").body
    except SyntaxError as error:
        column = error.offset + shift if error.offset else len(text) + 1
        end = error.end_offset + shift if error.end_offset else None
        raise BadFilter(_hint(text, column, error.msg), min(column, len(text) + 1), end) from error
    except (ValueError, MemoryError, RecursionError) as error:
        raise BadFilter("this cannot be read; it may be nested too deeply") from error
    _check_size(tree)
    compiled = Filter(text, tree, shift)
    compiled.mask(Snapshot(Pools()))  # the kinds of its values do not depend on the rows, so mistakes show here
    return compiled


def _check_characters(text: str) -> None:
    if not text:
        raise BadFilter("the filter is empty", 1)
    depth = 0
    for column, character in enumerate(text, start=1):
        if not character.isprintable():
            raise BadFilter(f"the character U+{ord(character):04X} cannot stand in a filter", column)
        depth += (character in "([{") - (character in ")]}")
        if depth > DEEPEST:
            raise BadFilter("nested too deeply", column)


def _hint(text: str, column: int, problem: str) -> str:
    if "never closed" in problem or "unterminated" in problem:
        return "this is never closed"
    if "unmatched" in problem:
        return "this closes what was never opened"
    here = text[max(column - 2, 0) : column + 2]
    if "&" in here or "|" in here or "!" in here.replace("!=", ""):
        return "write and, or, not in words"
    if "=" in here and not any(two in here for two in ("==", "!=", "<=", ">=")):
        return "use == to compare"
    return "this cannot be read" if column <= len(text) else "the filter ends too early"


def _check_size(tree: ast.expr) -> None:
    """Bound the depth and the work before anything walks the tree by recursion."""
    level: list[ast.AST] = [tree]
    depth = nodes = 0
    while level:
        depth, nodes = depth + 1, nodes + len(level)
        if depth > 2 * DEEPEST or nodes > _MOST_NODES:
            column = min((node.col_offset + 1 for node in level if isinstance(node, ast.expr)), default=1)
            raise BadFilter("nested too deeply" if depth > 2 * DEEPEST else "too long; leave some of it out", column)
        level = [child for node in level for child in ast.iter_child_nodes(node)]


# --- values: one for all rows (an array of no dimension), or one for each ---------------------------------------------


@dataclass(frozen=True, slots=True)
class _Number:
    values: Array


@dataclass(frozen=True, slots=True)
class _Coded:
    """Texts, or tuples of names, by code; -1 is null."""

    pool: list[Any]
    codes: Array
    source: ValuePool | None = None
    """The column's pool, which keeps its texts in lower case."""

    def map(self, function: Callable[[Any], Any], null: Any) -> Array:
        """A function of each row's value, computed once per different value."""
        return np.asarray(np.array([*(function(value) for value in self.pool), null])[self.codes])


@dataclass(frozen=True, slots=True)
class _Text(_Coded):
    pass


@dataclass(frozen=True, slots=True)
class _Names(_Coded):
    pass


@dataclass(frozen=True, slots=True)
class _Null:
    pass


@dataclass(frozen=True, slots=True)
class _Choice:
    items: list["_Value"]


_Value = _Number | _Text | _Names | _Null | _Choice
_CALLED = {_Number: "a number", _Text: "a text", _Names: "a list of names", _Null: "null", _Choice: "a list"}


class _Evaluation:
    """One expression over one snapshot."""

    def __init__(self, snapshot: Snapshot, text: str, shift: int) -> None:
        self.snapshot = snapshot
        self.text = text
        self.shift = shift

    def fail(self, node: ast.expr, message: str) -> BadFilter:
        content = self.text.lstrip().encode()  # a node's offsets count bytes
        start, end = (
            len(content[:offset].decode(errors="ignore")) for offset in (node.col_offset, node.end_col_offset)
        )
        return BadFilter(message, start + self.shift + 1, end + self.shift + 1)

    def truth(self, node: ast.expr) -> Array:
        """A condition as True or False by row."""
        match node:
            case ast.BoolOp(ast.And(), values):
                return self._all([self.truth(value) for value in values], np.logical_and)
            case ast.BoolOp(ast.Or(), values):
                return self._all([self.truth(value) for value in values], np.logical_or)
            case ast.UnaryOp(ast.Not(), operand):
                return np.logical_not(self.truth(operand))
            case ast.Compare(left, ops, comparators):
                steps = zip(ops, [left, *comparators], comparators, strict=False)
                return self._all([self._compare(node, *step) for step in steps], np.logical_and)
        match self.value(node):
            case _Number(numbers):
                return np.asarray(np.nan_to_num(numbers) != 0)
            case _Text() | _Names() as coded:
                return coded.map(bool, False).astype(bool)
            case _Null():
                return np.asarray(False)
        raise self.fail(node, "a list is not a condition")

    @staticmethod
    def _all(masks: list[Array], join: Callable[[Array, Array], Array]) -> Array:
        joined = masks[0]
        for mask in masks[1:]:
            joined = join(joined, mask)
        return joined

    def value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Constant(value):
                return self._constant(node, value)
            case ast.Name(name):
                return self._name(node, name)
            case ast.Subscript(ast.Name(name), ast.Constant(str() as part)) if name in _PARTS:
                return self._part(node, part)
            case ast.Attribute(ast.Name(name), part) if name in _PARTS:
                return self._part(node, part)
            case ast.UnaryOp(ast.USub() | ast.UAdd() as sign, operand):
                values = self._number(operand)
                return _Number(-values if isinstance(sign, ast.USub) else values)
            case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
                return self._arithmetic(op, self._number(left), self._number(right))
            case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS:
                return self._call(node, name, arguments)
            case ast.Tuple(items) | ast.List(items):
                return _Choice([self.value(item) for item in items])
            case ast.BoolOp() | ast.Compare() | ast.UnaryOp(ast.Not()):
                return _Number(self.truth(node).astype(np.float64))
            case ast.Call(ast.Name(name)):
                is_function = name in FUNCTIONS
                raise self.fail(node, f"{name} takes no named arguments" if is_function else _unknown("function", name))
            case ast.BinOp():
                raise self.fail(node, "of arithmetic there is + - * /")
        raise self.fail(node, "this is not part of the filter language")

    def _constant(self, node: ast.expr, value: Any) -> _Value:
        if value is None:
            return _Null()
        if isinstance(value, str):
            return _Text([value], np.asarray(0))
        if isinstance(value, bool | int | float):
            try:
                return _Number(np.asarray(float(value)))
            except OverflowError:
                raise self.fail(node, "the number is too large") from None
        raise self.fail(node, f"{type(value).__name__} is not part of the filter language")

    def _name(self, node: ast.expr, name: str) -> _Value:
        columns, pools = self.snapshot.columns, self.snapshot.pools.by_column
        if name in GROUPED:
            return _Number(self.snapshot.groups[name])
        if name == "split":
            return _Text(list(SPLITS), self.snapshot.split)
        if name in FIELDS:
            match KINDS[name]:
                case ColumnKind.TEXT:
                    return _Text(pools[name].values, columns[name], pools[name])
                case ColumnKind.NAMES:
                    return _Names(pools[name].values, columns[name])
                case ColumnKind.TRUTH:
                    return _Number(np.where(columns[name] < 0, np.nan, columns[name]))
                case _:
                    return _Number(columns[name].astype(np.float64))
        if name.lower() in _WORDS:
            word = _WORDS[name.lower()]
            return _Null() if word is None else _Number(np.asarray(word))
        if name in _PARTS:
            raise self.fail(node, 'name a reward part: part["acc"] or parts.acc')
        raise self.fail(node, _unknown("field", name))

    def _part(self, node: ast.expr, name: str) -> _Value:
        if not self.snapshot.size:
            return _Number(np.zeros(0))
        if name not in self.snapshot.part_names:
            raise self.fail(node, unknown("reward part", name[:80], self.snapshot.part_names))
        return _Number(self.snapshot.part(name))

    def _number(self, node: ast.expr) -> Array:
        value = self.value(node)
        if isinstance(value, _Null):
            return np.asarray(np.nan)
        if not isinstance(value, _Number):
            raise self.fail(node, f"a number is needed here, not {_CALLED[type(value)]}")
        return value.values

    def _arithmetic(self, op: ast.operator, left: Array, right: Array) -> _Number:
        with np.errstate(all="ignore"):
            result = np.asarray(_ARITHMETIC[type(op)](left, right), dtype=np.float64)
        return _Number(np.where(np.isfinite(result), result, np.nan))  # a division by 0 has no result: null

    def _call(self, node: ast.expr, name: str, arguments: list[ast.expr]) -> _Value:
        if len(arguments) != FUNCTIONS[name]:
            raise self.fail(node, f"{name} takes {FUNCTIONS[name]} argument(s), not {len(arguments)}")
        if name == "abs":
            return _Number(np.abs(self._number(arguments[0])))
        if name == "tool":
            tools = self._name(node, "tools")
            return _Number(self._within(node, self.value(arguments[0]), tools).astype(np.float64))
        first = self.value(arguments[0])
        if name == "len" and isinstance(first, _Text | _Names):
            return _Number(first.map(len, np.nan).astype(np.float64))
        if name == "lower" and isinstance(first, _Text):
            return _lowered(first)
        if name == "contains" and isinstance(first, _Text | _Names):
            part = self.value(arguments[1])
            if isinstance(first, _Text) and isinstance(part, _Text):
                first, part = _lowered(first), _lowered(part)
            return _Number(self._within(arguments[1], part, first).astype(np.float64))
        raise self.fail(arguments[0], f"{name} does not take {_CALLED[type(first)]}")

    # --- comparisons --------------------------------------------------------------------------------------------------

    def _compare(self, whole: ast.expr, op: ast.cmpop, left: ast.expr, right: ast.expr) -> Array:
        first, second = self.value(left), self.value(right)
        if isinstance(op, ast.In | ast.NotIn):
            within = self._within(left, first, second)
            return within if isinstance(op, ast.In) else np.logical_not(within) & ~self._is_null(first)
        null = isinstance(first, _Null) or isinstance(second, _Null)
        if isinstance(op, ast.Is | ast.IsNot):
            if not null:
                raise self.fail(left, "`is` is for null; use == to compare")
            op = ast.Eq() if isinstance(op, ast.Is) else ast.NotEq()
        if null:
            if not isinstance(op, ast.Eq | ast.NotEq):
                return np.asarray(False)
            absent = self._is_null(second if isinstance(first, _Null) else first)
            return absent if isinstance(op, ast.Eq) else np.logical_not(absent)
        return self._ordered(right, _COMPARE[type(op)], first, second)

    def _ordered(self, node: ast.expr, test: Callable[[Any, Any], Any], first: _Value, second: _Value) -> Array:
        match first, second:
            case _Number(left), _Number(right):
                with np.errstate(invalid="ignore"):
                    return np.asarray(test(left, right) & ~np.isnan(left) & ~np.isnan(right))
            case _Text() as left, _Text() as right:
                return _pairwise(test, left, right)
        raise self.fail(node, f"{_CALLED[type(first)]} cannot be compared with {_CALLED[type(second)]}")

    def _within(self, node: ast.expr, value: _Value, other: _Value) -> Array:
        match value, other:
            case _, _Choice(items):
                mask = np.asarray(False)
                for item in items:
                    null = isinstance(item, _Null)
                    same = self._is_null(value) if null else self._ordered(node, operator.eq, value, item)
                    mask = np.logical_or(mask, same)
                return mask
            case _Text(), _Text() | _Names():
                return _pairwise(operator.contains, other, value)
        raise self.fail(node, f"{_CALLED[type(value)]} cannot be in {_CALLED[type(other)]}")

    def _is_null(self, value: _Value) -> Array:
        match value:
            case _Number(values):
                return np.isnan(values)
            case _Text() | _Names():
                return np.asarray(value.codes < 0)
        return np.asarray(isinstance(value, _Null))


def _lowered(text: _Text) -> _Text:
    pool = [value.lower() for value in text.pool] if text.source is None else text.source.lowered()
    return _Text(pool, text.codes)


def _pairwise(test: Callable[[Any, Any], Any], left: _Coded, right: _Coded) -> Array:
    """A test of two texts by row; false where one is null."""
    if not right.codes.ndim:
        fixed = right.pool[int(right.codes)]
        return np.array([*(test(value, fixed) for value in left.pool), False], dtype=bool)[left.codes]
    if not left.codes.ndim:
        fixed = left.pool[int(left.codes)]
        return np.array([*(test(fixed, value) for value in right.pool), False], dtype=bool)[right.codes]
    return np.fromiter(_by_row(test, left, right), dtype=bool, count=len(left.codes))


def _by_row(test: Callable[[Any, Any], Any], left: _Coded, right: _Coded) -> Iterator[bool]:
    for first, second in zip(left.codes.tolist(), right.codes.tolist(), strict=True):
        yield first >= 0 and second >= 0 and bool(test(left.pool[first], right.pool[second]))


def _unknown(kind: str, name: str) -> str:
    return unknown(kind, name[:80], FIELDS if kind == "field" else FUNCTIONS)
