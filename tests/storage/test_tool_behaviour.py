"""How an episode went about its tools: evidence, its use, repeats and code that only prints."""

import pytest

from turnwise.storage.tool_behaviour import tool_behaviour
from turnwise.types import (
    CallRecord,
    CallStatus,
    FinishReason,
    Message,
    Role,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)


def episode(*turns, question="What is 12 times 34?"):
    """Turns are (assistant text, [(arguments, status, reply)])."""
    made = []
    for index, (text, calls) in enumerate(turns):
        records = [
            CallRecord(ToolCall(f"{index}_{n}", "python", arguments), status, 0.1)
            for n, (arguments, status, _) in enumerate(calls)
        ]
        replies = [Message(Role.TOOL, reply, tool_call_id=f"{index}_{n}") for n, (_, _, reply) in enumerate(calls)]
        message = Message(Role.ASSISTANT, text)
        made.append(Turn(index, message, FinishReason.STOP, 0, 1, 1, calls=records, replies=replies))
    prompt = (Message(Role.USER, question),)
    return Trajectory(Sample("a", prompt, "s"), 0, 0, list(prompt), made, [], StopReason.ANSWERED, 0.1)


OK, ERROR = CallStatus.OK, CallStatus.ERROR


@pytest.mark.parametrize(
    ("turns", "evidence", "used"),
    [
        ([("12*34", [({"code": "12*34"}, OK, "408")]), ("It is 408.", [])], True, True),
        ([("12*34", [({"code": "12*34"}, OK, "408")]), ("It is 407.", [])], True, False),
        ([("12*34", [({"code": "12*34"}, OK, "34")]), ("It is 34.", [])], True, False),  # 34 was in the question
        ([("12*34", [({"code": "12*34"}, ERROR, "408")]), ("It is 408.", [])], False, False),
        ([("12*34", [({"code": "12*34"}, OK, "(no output)")]), ("It is 408.", [])], False, False),
        ([("It is 408.", [({"code": "12*34"}, OK, "408")])], True, False),  # written before the reply
        ([("look", [({"code": "x"}, OK, "Elephants live there")]), ("They are elephants.", [])], True, True),
        ([("no tools", [])], False, False),
        ([("12*34", [({"code": "12*34"}, OK, "1,408.5")]), ("So 1408.5", [])], True, True),
    ],
)
def test_evidence_and_its_use(turns, evidence, used):
    found = tool_behaviour(episode(*turns))
    assert (found.evidence, found.used) == (evidence, used)


def test_duplicates_are_counted_whatever_the_order_of_the_arguments():
    calls = [({"a": 1, "b": 2}, OK, "x"), ({"b": 2, "a": 1}, OK, "x"), ({"a": 1}, OK, "x"), ({"a": 1}, ERROR, "x")]
    assert tool_behaviour(episode(("t", calls))).duplicate_calls == 2
    for status in (CallStatus.MALFORMED, CallStatus.REFUSED):
        assert tool_behaviour(episode(("t", [({}, status, "x")] * 3))).duplicate_calls == 0
    spaced = [({"code": "f(1)\nf(2)"}, OK, "x"), ({"code": "\nf(1)  \n\nf(2)\n"}, OK, "x")]
    assert tool_behaviour(episode(("t", spaced))).duplicate_calls == 1


def test_only_calls_that_worked_are_said_to_print():
    calls = [({"code": "print(1)"}, status, "x") for status in CallStatus]
    assert tool_behaviour(episode(("t", calls))).print_only == 2, "ok, and unknown in another system's record"
    assert [
        tool_behaviour(episode(("t", [({key: "print(1)"}, OK, "1")]))).print_only for key in ("script", "text")
    ] == [
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("code", "only"),
    [
        ("print(42)", True),
        ("print('so', 42)\n'done'", True),
        ("```python\nprint('7')\n```", True),
        ("<code>print('7')</code>", True),
        ("x = 42\nprint(x)", True),  # in other words
        ("import PIL\nanswer = '7'\nprint(f'{answer}', str(-7))", True),
        ("def f(x):\n    return x\nprint(f('7'))", True),
        ("print('se' + 'ven', '%d' % 7)", True),
        ("for line in ['a', 'b']:\n    print(line)", True),
        ("print(6 * 7)", False),  # what a tool is for
        ("x = 6\nx += 1\nprint(x)", False),
        ("print(sum([1, 2]))", False),
        ("print(img0.size)", False),
        ("print(result)", False),
        ("from PIL import Image\nImage.open('a.png').show()", False),
        ("import math", False),
        ("def f(x):\n    return x", False),
        ("x = 42", False),
        ("", False),
        ("print(", False),
        ("\x00", False),
        ("(" * 5000, False),
        ("-" * 19_000 + "1", False),
    ],
)
def test_code_that_only_prints(code, only):
    assert tool_behaviour(episode(("t", [({"code": code}, OK, "42")]))).print_only == int(only)


def test_arguments_of_any_shape_are_survived():
    deep = []
    for _ in range(5000):
        deep = [deep]
    calls = [({"code": 5}, OK, "x"), ({"code": None}, OK, "x"), ({"a": deep}, OK, "x"), ({"a": {1, 2}}, OK, "x")]
    assert tool_behaviour(episode(("t", calls))).print_only == 0
