"""Calls in JSON blocks and in MiniMax-M3's tags: several in one, nothing half read."""

from typing import Any

import pytest

from turnwise.chat.calls.tool_format import load_format
from turnwise.types import Message

F, G = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "arguments": {}}'
NS = "]<]minimax[>["


def parse(name: str, text: str, tools: Any = ()) -> Message:
    return load_format(name).parse(text, turn=0, in_reasoning=False, tools=tools)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("granite", f"<|tool_call|>[{F}, {G}]"), ("granite", f"<|tool_call|>\n[{F},\n{G}]\n"),
        ("apriel", f"<tool_calls>[{F}, {G}]</tool_calls>"), ("minimax_m1", f"<tool_calls>\n{F}\n{G}\n</tool_calls>"),
        ("phi4_mini", f"functools[{F}, {G}]"), ("phi4_mini", f"<|tool_call|>[{F}, {G}]<|/tool_call|>"),
        ("phi4_mini", f"{F},\n{G}"),
    ],
)  # fmt: skip
def test_several_calls_in_one_block(name: str, text: str) -> None:
    message = parse(name, f"<think>hm</think>I look.\n{text}")
    assert [(call.name, call.arguments, call.problem) for call in message.tool_calls] == [
        ("f", {"x": 1}, None),
        ("g", {}, None),
    ]
    assert (message.reasoning, message.answer) == ("hm", "I look.")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("granite", f"<|tool_call|>[{F}] I wait", "not valid JSON"), ("granite", "<|tool_call|>[]", "comes a list"),
        ("granite", f"<|tool_call|>{F}", "comes a list"), ("granite", "<|tool_call|>", "not valid JSON"),
        ("apriel", f"<tool_calls>[{F}]", "no </tool_calls>"), ("apriel", f"<tool_calls>{F}</tool_calls>", "comes a list"),
        ("minimax_m1", f"<tool_calls>{F},{G}</tool_calls>", "not valid JSON"), ("minimax_m1", "<tool_calls></tool_calls>", "comes a call"),
        ("minimax_m1", f"<tool_calls>{F}\n{G[:-1]}</tool_calls>", "not valid JSON"), ("minimax_m1", f"<tool_calls>{F}", "no </tool_calls>"),
        ("phi4_mini", f"functools[{F}", "not valid JSON"), ("phi4_mini", f"<|tool_call|>[{F}]", "no <|/tool_call|>"),
    ],
)  # fmt: skip
def test_what_is_not_a_whole_block_is_a_problem(name: str, text: str, problem: str) -> None:
    (call,) = parse(name, text).tool_calls
    assert call.problem is not None and problem in call.problem and call.arguments == {}


def test_functools_in_words_is_a_word() -> None:
    for words in ("import functools", "use functools[1]", "functools is a module"):
        message = parse("phi4_mini", words)
        assert message.tool_calls == () and message.answer == words


def m3(inside: str) -> str:
    return f'{NS}<tool_call>\n{NS}<invoke name="f">{inside}{NS}</invoke>\n{NS}</tool_call>'


def tag(name: str, inside: str) -> str:
    return f"{NS}<{name}>{inside}{NS}</{name}>"


TYPED = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "q": {"type": "string"},
                "n": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"type": "object", "properties": {"zip": {"type": "string"}, "item": {"type": "integer"}}},
            },
        },
    },
}


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        (tag("q", "42") + tag("n", "42"), {"q": "42", "n": 42}), ("", {}), ("\n", {}), (tag("q", ""), {"q": ""}),
        (tag("tags", tag("item", "1") + tag("item", "b")), {"tags": ["1", "b"]}), (tag("tags", ""), {"tags": []}),
        (tag("tags", '["1"]'), {"tags": ["1"]}), (tag("where", tag("zip", "08001")), {"where": {"zip": "08001"}}),
        (tag("where", tag("item", "3")), {"where": {"item": 3}}), (tag("where", ""), {"where": {}}),
        (tag("other", tag("item", tag("a", "1")) + tag("item", tag("a", "b"))), {"other": [{"a": 1}, {"a": "b"}]}),
        (tag("q", "a < b</q> \n"), {"q": "a < b</q> \n"}),
    ],
)  # fmt: skip
def test_minimax_m3_nests_and_the_schema_types(inside: str, arguments: dict[str, Any]) -> None:
    (call,) = parse("minimax_m3", m3(inside), [TYPED]).tool_calls
    assert (call.problem, call.arguments) == (None, arguments)


@pytest.mark.parametrize(
    "text",
    [
        m3(f"{NS}<q>Dallas{tag('n', '1')}"), m3(f"{NS}<q>Dallas{NS}</n>"), m3(tag("q", "a") + tag("q", "b")), m3("words"),
        m3(tag("q", "a") + "words"), m3(tag("q", "a" + tag("n", "1"))), m3(tag("q", "a")).removesuffix(f"{NS}</tool_call>"),
        f"{NS}<tool_call>{NS}</tool_call>", f"{NS}<tool_call>", m3(tag("a", "") * 1)[:-30], m3(f"{NS}<a>" * 300),
    ],
)  # fmt: skip
def test_minimax_m3_runs_nothing_that_is_not_whole(text: str) -> None:
    calls = parse("minimax_m3", text).tool_calls
    assert calls and all(call.problem and not call.arguments for call in calls), calls


def test_minimax_m3_thinks_in_its_own_tags() -> None:
    message = parse("minimax_m3", f"<mm:think>{m3('')}</mm:think>{m3(tag('n', '1'))}")
    assert [call.arguments for call in message.tool_calls] == [{"n": 1}] and message.reasoning == m3("")
