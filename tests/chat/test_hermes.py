"""The hermes format: what counts as reasoning, as a call and as an answer, and what is told about broken calls."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.chat.formats import hermes
from turnwise.types import ToolCall

GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
F1 = ("f", {"x": 1}, None)


def parse(text: str, in_reasoning: bool = False):
    return hermes.parse(text, turn=0, in_reasoning=in_reasoning)


def calls_of(message):
    return [(call.name, call.arguments, call.problem) for call in message.tool_calls]


def body(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


TEXTS = [  # text, reasoning, answer, calls
    ("", None, "", []),
    ("hello", None, "hello", []),
    ("  hello\n", None, "hello", []),
    (GOOD, None, "", [F1]),
    (f"before {GOOD} after", None, "before  after", [F1]),
    (f"{GOOD}\n{GOOD}", None, "", [F1, F1]),
    (f"a{GOOD}b{GOOD}c", None, "abc", [F1, F1]),
    (f"```\n{GOOD}\n```", None, "```\n\n```", [F1]),
    (GOOD.replace("\n", "\r\n"), None, "", [F1]),
    (GOOD.replace("\n", ""), None, "", [F1]),
    ("</tool_call> stray", None, "</tool_call> stray", []),
    ("<tool_call", None, "<tool_call", []),
    ("<TOOL_CALL>{}</TOOL_CALL>", None, "<TOOL_CALL>{}</TOOL_CALL>", []),
    ("<think>hm</think>yes", "hm", "yes", []),
    ("<think>\nhm\n</think>\n\nyes", "hm", "yes", []),
    ("<think></think>yes", "", "yes", []),
    ("<think>hm", "hm", "", []),
    ("yes<think>hm", "hm", "yes", []),
    ("hm</think>yes", "hm", "yes", []),
    ("</think>yes", "", "yes", []),
    ("<think>a</think>b<think>c</think>d", "a\nc", "bd", []),
    ("<think>a<think>b</think>c", "a<think>b", "c", []),
    ("<think>a</think>b</think>c", "a\nb", "c", []),
    ("a<think>b</think>c</think>d", "b\nc", "ad", []),
    (f"<think>{GOOD}</think>yes", GOOD, "yes", []),
    (f"<think>{GOOD}</think>{GOOD}", GOOD, "", [F1]),
    (f"<think>{GOOD}", GOOD, "", []),
    (f"maybe {GOOD} no</think>yes", f"maybe {GOOD} no", "yes", []),
    (f"<think>a</think>{GOOD}b</think>c", f"a\n{GOOD}b", "c", []),
    (f"{GOOD}<think>hm</think>", "hm", "", [F1]),
    ("<think>a <tool_call> b</think>yes", "a <tool_call> b", "yes", []),
    ("<tool_call> hm </think>yes", "<tool_call> hm", "yes", []),
    (
        f"{body('oops')}{GOOD}",
        None,
        "",
        [("", {}, "the call is not valid JSON: Expecting value: line 1 column 1 (char 0)"), F1],
    ),
]


@pytest.mark.parametrize(("text", "reasoning", "answer", "calls"), TEXTS)
def test_texts(text, reasoning, answer, calls):
    message = parse(text)
    assert message.text == text, "content is what the policy wrote, whatever was read from it"
    assert (message.reasoning, message.answer) == (reasoning, answer)
    assert calls_of(message) == calls


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "calls"),
    [
        ("hm</think>yes", "hm", "yes", 0),
        ("hm", "hm", "", 0),
        ("", "", "", 0),
        (GOOD, GOOD, "", 0),
        (f"{GOOD}</think>{GOOD}", GOOD, "", 1),
        ("<think>hm</think>yes", "hm", "yes", 0),
        ("\n<think>hm", "hm", "", 0),
    ],
)
def test_texts_whose_prompt_opened_the_reasoning(text, reasoning, answer, calls):
    message = parse(text, in_reasoning=True)
    assert (message.reasoning, message.answer, len(message.tool_calls)) == (reasoning, answer, calls)


ARGUMENTS = [  # the text of a call, the arguments read from it
    ('{"name": "f", "arguments": {}}', {}),
    ('{"arguments": {"x": [1, {"y": null}]}, "name": "f"}', {"x": [1, {"y": None}]}),
    ('{"name": "f", "arguments": "{\\"x\\": 1}"}', {"x": 1}),
    ('{"name": "f", "arguments": "{}"}', {}),
    ('{"name": "f", "arguments": {"x": "{}}}{"}}', {"x": "{}}}{"}),
    ('{"name": "f", "arguments": {"x": "</tool_call>"}}', {"x": "</tool_call>"}),
    ('{"name": "f", "arguments": {"x": "<tool_call>{}</tool_call>"}}', {"x": "<tool_call>{}</tool_call>"}),
    ('{"name": "f", "arguments": {"x": "<think>"}}', {"x": "<think>"}),
    ('{"name": "f", "arguments": {"x": "</think>"}}', {"x": "</think>"}),
    ('{"name": "f", "arguments": {"x": "say \\"</tool_call>\\" \\\\"}}', {"x": 'say "</tool_call>" \\'}),
    ('{"name": "f", "arguments": {"x": "\\u00e9\\ud83d\\ude42"}}', {"x": "é🙂"}),
    ('{"name": "f", "arguments": {"x": "é🙂"}}', {"x": "é🙂"}),
    ('{"name": "f", "arguments": {"x": 1}, "id": "extra"}', {"x": 1}),
    ('\n\t {"name": "f",\r\n "arguments": {"x": 1e3}} \n', {"x": 1000.0}),
    ('{"name": "f", "arguments": {"x": ' + "[" * 100 + "]" * 100 + "}}", {"x": json.loads("[" * 100 + "]" * 100)}),
]


@pytest.mark.parametrize(("text", "arguments"), ARGUMENTS)
def test_arguments(text, arguments):
    message = parse(f"a{body(text)}b")
    assert calls_of(message) == [("f", arguments, None)]
    assert (message.answer, message.reasoning) == ("ab", None)


PROBLEMS = [  # the text of a call, its name as far as it was read, words of the problem
    ("", "", "not valid JSON"),
    ("f(x=1)", "", "not valid JSON"),
    ('{"name": "f", "arguments": {}', "", "not valid JSON"),
    ('{"name": "f", "arguments": {}} and more', "", "not valid JSON: Extra data"),
    ('```json\n{"name": "f", "arguments": {}}\n```', "", "not valid JSON"),
    ("{'name': 'f', 'arguments': {}}", "", "not valid JSON"),
    ('{"name": "f", "arguments": {"x": NaN}}', "", "NaN is not JSON"),
    ('{"name": "f", "arguments": {"x": -Infinity}}', "", "-Infinity is not JSON"),
    ('{"name": "f", "arguments": {"x": "\\ud83d"}}', "", "surrogates not allowed"),
    ('{"name": "f", "arguments": {"x": "\n"}}', "", "Invalid control character"),
    ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "", "not valid JSON"),
    ("[" * 100_000, "", "not valid JSON"),
    ('{"name": "f", "arguments": {"x": ' + '{"x": ' * 50_000 + "1" + "}" * 50_001 + "}", "", "recursion"),
    ('{"name": "f", "arguments": {"x": ' + "[" * 300 + "]" * 300 + "}}", "", "nested more than 200 deep"),
    ('[{"name": "f", "arguments": {}}]', "", "must be an object"),
    ('"f"', "", "must be an object"),
    ("null", "", "must be an object"),
    ("{}", "", 'no "name"'),
    ('{"arguments": {}}', "", 'no "name"'),
    ('{"name": "", "arguments": {}}', "", 'no "name"'),
    ('{"name": null, "arguments": {}}', "", 'no "name"'),
    ('{"name": 7, "arguments": {}}', "", 'no "name"'),
    ('{"name": "f"}', "f", '"arguments" must be an object'),
    ('{"name": "f", "parameters": {"x": 1}}', "f", '"arguments" must be an object'),
    ('{"name": "f", "arguments": null}', "f", '"arguments" must be an object'),
    ('{"name": "f", "arguments": [1]}', "f", '"arguments" must be an object'),
    ('{"name": "f", "arguments": 7}', "f", '"arguments" must be an object'),
    ('{"name": "f", "arguments": ""}', "f", '"arguments" is not valid JSON'),
    ('{"name": "f", "arguments": "x=1"}', "f", '"arguments" is not valid JSON'),
    ('{"name": "f", "arguments": "[1]"}', "f", '"arguments" must be an object'),
    ('{"name": "f", "arguments": "' + "[" * 100_000 + '"}', "f", '"arguments" is not valid JSON'),
]


@pytest.mark.parametrize(("text", "name", "problem"), PROBLEMS, ids=lambda value: str(value)[:40])
def test_problems(text, name, problem):
    (call,) = parse(body(text)).tool_calls
    assert (call.name, call.arguments) == (name, {})
    assert problem in call.problem


@pytest.mark.parametrize("text", [GOOD.removesuffix("</tool_call>"), "<tool_call>", "<tool_call>{", GOOD[:-1]])
def test_a_call_without_its_end_is_told_so(text):
    (call,) = parse(text).tool_calls
    assert call.problem == "the call has no </tool_call>"


def test_a_call_that_begins_inside_another_ends_that_one():
    message = parse(f"<tool_call>{GOOD}")
    assert [call.problem for call in message.tool_calls] == ["the call has no </tool_call>", None]
    message = parse('<tool_call>{"name": "f", "arg<tool_call>{"name": "g", "arguments": {}}</tool_call>')
    assert [call.name for call in message.tool_calls] == ["", "g"]


def test_a_broken_call_does_not_swallow_the_next():
    message = parse(f'<tool_call>{{"name": "f}}</tool_call> He said "hi". {GOOD}')
    assert [bool(call.problem) for call in message.tool_calls] == [True, False]
    assert message.answer == 'He said "hi".'
    message = parse('<tool_call>{"name": "f}</tool_call> He said "hi</tool_call>')
    assert (len(message.tool_calls), message.answer) == (1, 'He said "hi</tool_call>')


def test_every_call_has_an_id_of_nine_letters_and_digits():
    message = hermes.parse(GOOD * 12, turn=1234, in_reasoning=False)
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 12
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)
    assert ids[0] != parse(GOOD).tool_calls[0].id


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "<think>",
        "</think>",
        "</tool_call>",
        '<tool_call>"',
        '<tool_call>\\"',
        '<tool_call>{"a":"',
        "<tool_call>[",
        '<tool_call>"\\"',
        "<",
        "<think></think>",
        '<tool_call>x</tool_call>"',
        "\\",
        '"',
        "<tool_call>{}",
    ],
)
def test_huge_input_is_read_in_one_go(unit):
    """Linear time: a scan that starts over at every tag would take hours here."""
    message = parse(unit * 30_000)
    assert message.text == unit * 30_000


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)
tagged = st.sampled_from(["</tool_call>", "<tool_call>", "<think>", "</think>", '"', "\\", "{", "}", "\n", "x"])
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
arguments = st.dictionaries(st.text(), json_values | st.lists(tagged).map("".join), max_size=4).filter(
    lambda value: all(key.isprintable() for key in value)
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.builds(ToolCall, st.just(""), names, arguments), min_size=1, max_size=3), st.booleans())
def test_what_is_rendered_is_read_back(calls, thinking):
    text = ("<think>\nhm\n</think>\n\n" if thinking else "") + "\n".join(map(hermes.render_call, calls))
    message = parse(text)
    assert [(call.name, call.arguments, call.problem) for call in message.tool_calls] == [
        (call.name, call.arguments, None) for call in calls
    ]
    assert message.reasoning == ("hm" if thinking else None)
    assert message.answer == ""


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(tagged | st.just(GOOD), max_size=12).map("".join), st.booleans())
def test_no_text_is_too_strange(text, in_reasoning):
    message = parse(text, in_reasoning)
    assert message.text == text
    assert all(call.problem or call.name for call in message.tool_calls)
    if in_reasoning and "</think>" not in text:
        assert not message.tool_calls or text.lstrip().startswith("<think>")


def test_a_thought_that_is_closed_at_once_is_empty() -> None:
    """The template opened it; all after its end is the answer."""
    message = hermes.parse("</think>yes", turn=0, in_reasoning=True)
    assert (message.reasoning, message.answer) == ("", "yes")
