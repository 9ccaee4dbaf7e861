"""The quick JSON says what the standard library's says, and takes what a model may write."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.storage.json_text import parse, to_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_both_ways_equal_the_standard_library(value):
    assert json.loads(to_json(value)) == value
    assert parse(json.dumps(value)) == value == parse(json.dumps(value, ensure_ascii=False).encode())


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_becomes_null(odd):
    assert to_json({"a": [1.5, odd, (odd, 2)], "b": odd}) == b'{"a":[1.5,null,[null,2]],"b":null}'
    assert json.loads(to_json({"a": [odd, "\ud800"], "b": odd})) == {"a": [None, "\ud800"], "b": None}


def test_half_of_a_surrogate_pair_survives():
    assert parse(rb'{"a": "x\udc80y"}') == {"a": "x\udc80y"}
    assert parse(to_json("x\udc80y")) == "x\udc80y"


@pytest.mark.parametrize("text", ["", "{", b"\xff", "nul", "{} {}", b"\x00"])
def test_what_is_no_json_raises(text):
    with pytest.raises(ValueError):
        parse(text)
