"""The calculate tool: exact, bounded, and plain about what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ToolError
from turnwise.rollout.tools.calculate import MAX_DIGITS, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("6*7", "42"), (" 6 * 7 ", "42"), ("0.1 + 0.2", "0.3"), ("1/3", "0.3333333333"), ("-2**2", "-4"),
        ("(-2)**3", "-8"), ("2**-2", "0.25"), ("7 // 2", "3"), ("-7 // 2", "-4"), ("7 % 3", "1"), ("+5", "5"),
        ("1_000 * 2", "2000"), ("10**20", "1" + "0" * 20), ("10**20 / 3", "3.333333e+19"), ("1e3", "1000"),
    ],
)  # fmt: skip
def test_values(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "not an arithmetic expression"), ("6*", "not an arithmetic expression"), ("6 7", "not an arithmetic"),
        ("\x00", "not an arithmetic expression"), ("1/0", "division by zero"), ("0**-1", "division by zero"),
        ("5 % 0", "division by zero"), ("abs(3)", "only numbers"), ("x", "only numbers"), ("'a'*3", "only numbers"),
        ("True", "only numbers"), ("3j", "only numbers"), ("[1]", "only numbers"), ("1 if 1 else 2", "only numbers"),
        ("2**0.5", "whole numbers"), ("9**9**9", "more than 200 digits"), ("10**100*10**100*10", "more than 200"),
        ("1e400", "more than 200 digits"), ("1" * 401, "longer than 400"), ("(" * 150 + "1" + ")" * 150, None),
        ("-" * 399 + "1", None),
    ],
)  # fmt: skip
def test_refusals(expression, words):
    try:
        value = evaluate(expression)
    except ToolError as error:
        assert words is None or words in str(error)
    else:
        assert words is None and value in ("1", "-1")


@given(st.text(max_size=40) | st.from_regex(r"[-+*/%(). 0-9e]{0,40}", fullmatch=True))
def test_whatever_is_written_there_is_a_value_or_a_word_about_it(expression):
    try:
        value = evaluate(expression)
    except ToolError:
        return
    assert float(value) == float(value) and len(value) <= 2 * MAX_DIGITS


@given(a=st.integers(-(10**9), 10**9), b=st.integers(-(10**9), 10**9), c=st.integers(1, 10**6))
def test_whole_numbers_are_exact(a, b, c):
    assert evaluate(f"({a}) * ({b}) + {c}") == str(a * b + c)
    assert evaluate(f"({a}) // {c}") == str(a // c)
