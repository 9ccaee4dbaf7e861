"""The `calculate` tool: exact arithmetic on an expression, evaluated by walking its syntax tree."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from turnwise.errors import ToolError
from turnwise.rollout.tools.tool import tool

MAX_LENGTH = 400
MAX_DIGITS = 200
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


@tool
async def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return evaluate(expression)


calculate.instant = True


def evaluate(expression: str) -> str:
    """The value as text; ToolError says what is wrong with the expression."""
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression is longer than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"not an arithmetic expression: {expression[:80]!r}") from error
    try:
        return _show(_value(tree.body))
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except RecursionError as error:
        raise ToolError("the expression is nested too deeply") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            raise ToolError("only numbers can be calculated")
        case ast.Constant(value=int() as number):
            return Fraction(number)
        case ast.Constant(value=float() as number):
            return Fraction(str(number)) if abs(number) != float("inf") else _too_large()
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand)
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp() if type(node.op) in _BINARY:
            return _within(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
        case _:
            raise ToolError("only numbers, + - * / // % ** and parentheses can be calculated")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("exponents must be whole numbers")
    digits = max(len(str(abs(base.numerator))), len(str(base.denominator)))
    if abs(exponent) * digits > MAX_DIGITS:
        _too_large()
    return _within(base ** int(exponent))


def _within(value: Fraction) -> Fraction:
    if abs(value.numerator) >= 10**MAX_DIGITS or value.denominator >= 10**MAX_DIGITS:
        _too_large()
    return value


def _too_large() -> Fraction:
    raise ToolError(f"the number has more than {MAX_DIGITS} digits")


def _show(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10g}" if abs(value) < 10**15 else f"{float(value):.6e}"
