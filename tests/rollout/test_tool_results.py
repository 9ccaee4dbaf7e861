"""What tools return and raise: shown, cut or told as an error, and never the end of the run."""

import asyncio
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.choices import Keep
from turnwise.errors import EpisodeError, PluginError, ToolError
from turnwise.rollout.toolbox.toolbox import clean
from turnwise.types import CallStatus, Image, ToolResult


def returns(value):
    def give():
        """Return a value."""
        return value

    return give


def raises(error):
    def fail():
        """Raise an error."""
        raise error

    return fail


def async_raises(error):
    async def fail():
        """Raise an error."""
        raise error

    return fail


# --- what tools return --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("hello", "hello"),
        ("", ""),
        (7, "7"),
        (0.5, "0.5"),
        (True, "true"),
        ([1, "ä"], '[1, "ä"]'),
        ({"a": None}, '{"a": null}'),
        (ToolResult("fine"), "fine"),
        ("nul \x00 and half \ud83d a pair", "nul \N{REPLACEMENT CHARACTER} and half \N{REPLACEMENT CHARACTER} a pair"),
        ("a pair \ud83d\ude00", "a pair \U0001f600"),
    ],
)
def test_what_can_be_shown_is_shown(value, text, one):
    reply, record = one(returns(value))
    assert (reply.text, record.status) == (text, CallStatus.OK)
    assert reply.text.encode().decode() == text


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"bytes",
        object(),
        (1, 2),
        {1, 2},
        {"a": object()},
        ToolResult(None),
        ToolResult("x", score=float("nan")),
        ToolResult("x", score="much"),
        ToolResult("x", info={"a": object()}),
        ToolResult("x", info=["not", "a", "dict"]),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_what_cannot_be_shown_or_stored_is_an_error_the_model_is_told(value, one):
    reply, record = one(returns(value))
    assert record.status is CallStatus.ERROR
    assert reply.text.startswith("Error: the tool")


def test_a_cycle_is_an_error(one):
    cycle = []
    cycle.append(cycle)
    assert one(returns(cycle))[1].status is CallStatus.ERROR


def test_score_and_info_are_recorded_as_a_copy(one):
    info = {"seen": [1]}
    _, record = one(returns(ToolResult("x", score=1, info=info)))
    info["seen"].append(2)
    assert (record.score, record.info) == (1.0, {"seen": [1]})


def test_an_image_that_cannot_be_read_is_told(one):
    reply, record = one(returns(ToolResult("look", images=(Image("a.png"),))))
    assert record.status is CallStatus.ERROR and "the image a.png cannot be read" in reply.text


@pytest.mark.parametrize("keep", Keep)
def test_ten_megabytes_are_cut_and_say_so(keep, one):
    text = "a" * 5_000_000 + "b" * 5_000_000
    reply, record = one(returns(text), max_reply_tokens=25, keep=keep)
    assert record.truncated and record.status is CallStatus.OK
    assert "9999900 characters left out" in reply.text
    kept = reply.text.replace("\n[... 9999900 characters left out ...]\n", "")
    assert kept == {Keep.head: "a" * 100, Keep.tail: "b" * 100, Keep.both: "a" * 50 + "b" * 50}[keep]


@given(st.text(st.characters()))
def test_cleaned_text_is_encodable_and_otherwise_unchanged(text):
    cleaned = clean(text)
    cleaned.encode()
    assert "\x00" not in cleaned
    if text.isprintable() and not any("\ud800" <= c <= "\udfff" for c in text):
        assert cleaned == text


# --- what tools raise ---------------------------------------------------------------------------------------------


class Odd(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolError("try 6*7"), "Error: try 6*7"),
        (ValueError("bad \ud800"), "Error: ValueError: bad \N{REPLACEMENT CHARACTER}"),
        (TimeoutError("of its own"), "Error: TimeoutError: of its own"),
        (StopIteration(3), "StopIteration"),
        (SystemExit(3), "Error: SystemExit: 3"),
        (Odd("odd"), "Error: Odd: odd"),
        (asyncio.CancelledError("me"), "CancelledError"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("make", [raises, async_raises])
def test_whatever_a_tool_raises_is_told_and_the_run_goes_on(make, error, text, one):
    reply, record = one(make(error))
    assert record.status is (CallStatus.ERROR if isinstance(error, ToolError) else CallStatus.CRASHED)
    assert text in reply.text


@pytest.mark.parametrize("leave", [sys.exit, lambda: (_ for _ in ()).throw(KeyboardInterrupt)])
def test_a_synchronous_tool_cannot_take_the_process_down(leave, one):
    def quits():
        """Leave."""
        leave()

    reply, record = one(quits)
    assert record.status is CallStatus.CRASHED
    assert "SystemExit" in reply.text or "KeyboardInterrupt" in reply.text


@pytest.mark.parametrize("error", [EpisodeError("sandbox gone"), PluginError("wrong set-up")])
@pytest.mark.parametrize("make", [raises, async_raises])
def test_infrastructure_failures_are_not_the_models_business(make, error, one):
    with pytest.raises(type(error), match=str(error)):
        one(make(error))
