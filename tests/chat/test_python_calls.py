"""Calls written as Python are read as literals, all or nothing; whatever else Python could mean is a problem and never run."""

import pytest

from turnwise.chat.calls.tool_format import load_format
from turnwise.types import ToolCall

WRAPPED = {"pythonic": "{}", "lfm2": "<|tool_call_start|>{}<|tool_call_end|>"}


def read(name: str, calls: str) -> tuple[ToolCall, ...]:
    text = WRAPPED[name].replace("{}", calls)
    return tuple(load_format(name).parse(text, turn=0, in_reasoning=False).tool_calls)


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'a'", "a"), ('"it\'s"', "it's"), (r"'it\'s'", "it's"), (r"'a\nb\t\\'", "a\nb\t\\"), ("'a\nb'", "a\nb"),
        (r"'\x41\u00e9\U0001F642\101'", "Aé🙂A"), (r"'\d+\.'", r"\d+\."), ("''", ""), ("'[f(x=1)]'", "[f(x=1)]"),
        ("1", 1), ("-1", -1), ("+2", 2), ("1.5", 1.5), (".5", 0.5), ("1e3", 1000.0), ("-1.5E-2", -0.015),
        ("True", True), ("false", False), ("None", None), ("null", None),
        ("[]", []), ("[1, 'a', [True],]", [1, "a", [True]]), ("{}", {}), ("{'a': {\"b\": [1]}}", {"a": {"b": [1]}}),
    ],
)  # fmt: skip
def test_literals(name: str, written: str, value: object) -> None:
    (call,) = read(name, f"[f(x={written})]")
    assert (call.name, call.arguments, call.problem) == ("f", {"x": value}, None)
    assert type(call.arguments["x"]) is type(value)


@pytest.mark.parametrize("name", WRAPPED)
def test_several_calls_with_space_between(name: str) -> None:
    calls = read(name, '[ f(x=1,\n  y = "a, b)]"), ns.get-it(), g( z=[1,\n2] ) ]')
    assert [(call.name, call.arguments, call.problem) for call in calls] == [
        ("f", {"x": 1, "y": "a, b)]"}, None), ("ns.get-it", {}, None), ("g", {"z": [1, 2]}, None),
    ]  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize(
    "written",
    [
        "f(1)", "f(x)", "f(x=y)", "f(x=g())", "f(x=1 + 1)", "f(x=-y)", "f(x=not True)", "f(x=[i for i in y])", "f(x=lambda: 1)",
        "f(x=f'{y}')", "f(x=b'a')", "f(x=r'a')", "f(x='a' 'b')", "f(x='a'.upper())", "f(x=(1, 2))", "f(x={1: 2})", "f(x={1})",
        "f(x={'a'})", "f(x={'a': 1, 'a': 2})", "f(x=1, x=2)", "f(*x)", "f(**{'x': 1})", "f(x=...)", "f(x=nan)", "f(x=1e999)",
        "f(x=0x)", "f(x=1_)", "f(x=__import__('os').system('true'))", "f(x='a'", "f(x='a)", "f(x=)", "f(x=1", "f(x=[1)", "f(x=)",
        "f(x=1 y=2)", "f(x==1)", "f(x=" + "[" * 300 + "]" * 300 + ")", "f(x=" + "9" * 5000 + ")", r"f(x='\ud800')",
        r"f(x='\UFFFFFFFF')", "f(x=1), g", "f(x=1); g(y=2)", "f(x=1),,g()", "f(x=1).g()", "f(x=1)(y=2)", "f(x=True1)",
    ],
)  # fmt: skip
def test_anything_else_is_a_problem_and_no_call_of_its_list_is_run(name: str, written: str) -> None:
    calls = read(name, f"[ok(x=1), {written}]")
    assert calls and all(call.problem and not call.arguments for call in calls), calls


def test_words_beside_a_list_are_the_answer_and_lists_within_words_are_none() -> None:
    parse = load_format("pythonic").parse
    message = parse("I look.\n[f(x=1)] and wait", turn=0, in_reasoning=False)
    assert [call.name for call in message.tool_calls] == ["f"] and message.answer == "I look.\n and wait"
    for words in ("See [f(x=1)].", "[1, 2]", "[link](http://a.b/c(d))", "[x]", "[ ]", "[f]", "- [f(x=1)]"):
        assert parse(words, turn=0, in_reasoning=False).tool_calls == ()
    thought = parse("<think>\n[f(x=1)]\n</think>[g(x=2)]", turn=0, in_reasoning=False)
    assert [call.name for call in thought.tool_calls] == ["g"] and thought.reasoning == "[f(x=1)]"


def test_llama_4_may_mark_its_lists() -> None:
    parse = load_format("pythonic").parse
    message = parse("<|python_start|>[f(x=1)]<|python_end|>", turn=0, in_reasoning=False)
    assert [call.arguments for call in message.tool_calls] == [{"x": 1}] and message.answer == ""
    (call,) = parse("<|python_start|>print(1)<|python_end|>", turn=0, in_reasoning=False).tool_calls
    assert call.problem == "after <|python_start|> comes [NAME(KEY=VALUE, ...)]"


def test_lfm2_needs_its_marks() -> None:
    parse = load_format("lfm2").parse
    assert parse("[f(x=1)]", turn=0, in_reasoning=False).tool_calls == ()
    (call,) = parse("<|tool_call_start|>[f(x=1)] and", turn=0, in_reasoning=False).tool_calls
    assert call.problem == "the list of calls has no <|tool_call_end|>" and call.arguments == {}
    both = parse(
        "<|tool_call_start|>[f(x=]<|tool_call_end|>so<|tool_call_start|>[g()]<|tool_call_end|>",
        turn=0,
        in_reasoning=False,
    )
    assert [(call.name, bool(call.problem)) for call in both.tool_calls] == [("f", True), ("g", False)]
    assert both.answer == "so"
