"""The built-in template, word for word: the bundled model was trained on exactly this."""

import pytest

from turnwise.chat.formats import hermes
from turnwise.chat.renderer import Renderer
from turnwise.chat.tokenizer import Tokenizer
from turnwise.types import Message, Role, ToolCall

TOOL = {"type": "function", "function": {"name": "add", "description": 'Größe "x"', "parameters": {"type": "object"}}}
TOOL_TEXT = '{"type": "function", "function": {"name": "add", "description": "Größe \\"x\\"", "parameters": {"type": "object"}}}'
HOW = 'To call one, write:\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": "é", "y": [1, 2]}}}
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"x": "é", "y": [1, 2]}}\n</tool_call>'
PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

MESSAGES = [  # a message, its text
    ({"role": "system", "content": "Be brief."}, "<|im_start|>system\nBe brief.<|im_end|>\n"),
    ({"role": "system", "content": PARTS}, "<|im_start|>system\none two<|im_end|>\n"),
    ({"role": "user", "content": " hi \n"}, "<|im_start|>user\n hi \n<|im_end|>\n"),
    ({"role": "user", "content": ""}, "<|im_start|>user\n<|im_end|>\n"),
    ({"role": "user", "content": PARTS}, "<|im_start|>user\none two<|im_end|>\n"),
    ({"role": "assistant", "content": "yes"}, "<|im_start|>assistant\nyes<|im_end|>\n"),
    ({"role": "assistant", "content": ""}, "<|im_start|>assistant\n<|im_end|>\n"),
    (
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>\n",
    ),
    ({"role": "assistant", "content": "", "tool_calls": [CALL]}, f"<|im_start|>assistant\n{CALL_TEXT}<|im_end|>\n"),
    (
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        f"<|im_start|>assistant\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n",
    ),
    (
        {"role": "assistant", "content": "so", "tool_calls": [CALL, CALL]},
        f"<|im_start|>assistant\nso\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n",
    ),
    ({"role": "assistant", "content": PARTS, "tool_calls": []}, "<|im_start|>assistant\none two<|im_end|>\n"),
    (
        {"role": "assistant", "content": "", "tool_calls": [CALL["function"]]},
        f"<|im_start|>assistant\n{CALL_TEXT}<|im_end|>\n",
    ),
    (
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"x": 1}'}}]},
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n',
    ),
    ({"role": "tool", "content": "42"}, "<|im_start|>tool\n<tool_response>\n42\n</tool_response><|im_end|>\n"),
    (
        {"role": "tool", "content": PARTS, "name": "add", "tool_call_id": "a"},
        "<|im_start|>tool\n<tool_response>\none two\n</tool_response><|im_end|>\n",
    ),
    ({"role": "tool", "content": ""}, "<|im_start|>tool\n<tool_response>\n\n</tool_response><|im_end|>\n"),
]


@pytest.fixture(scope="module")
def chatml(folder):
    return Tokenizer(folder("qwen25"), "chatml_hermes")


@pytest.mark.parametrize(("message", "text"), MESSAGES)
def test_each_kind_of_message(chatml, message, text):
    assert chatml.apply_template([message], [], False, {}) == text
    assert chatml.apply_template([message], [], True, {}) == text + "<|im_start|>assistant\n"


def test_messages_follow_one_another_with_nothing_between(chatml):
    entries = [message for message, _ in MESSAGES]
    text = chatml.apply_template(entries, [], True, {})
    assert text == "".join(text for _, text in MESSAGES) + "<|im_start|>assistant\n"


def test_tools_are_shown_in_the_system_message(chatml):
    user = {"role": "user", "content": "hi"}
    rest = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    one = chatml.apply_template([user], [TOOL], True, {})
    assert one == f"<|im_start|>system\nTools:\n{TOOL_TEXT}\n{HOW}<|im_end|>\n{rest}"
    system = {"role": "system", "content": "Be brief."}
    two = chatml.apply_template([system, user], [TOOL, TOOL], True, {})
    assert two == f"<|im_start|>system\nBe brief.\nTools:\n{TOOL_TEXT}\n{TOOL_TEXT}\n{HOW}<|im_end|>\n{rest}"


def test_a_structured_call_reads_like_one_the_policy_wrote(chatml):
    renderer = Renderer(chatml, hermes)
    call = ToolCall("t000c0000", "add", {"x": 'é " \n', "y": [1, 2.5, None, True]})
    hello = Message(Role.USER, "hello")
    written = hermes.parse("so\n" + hermes.render_call(call), turn=0, in_reasoning=False)
    example = Message(Role.ASSISTANT, "so", (call,))
    texts = [renderer.render([hello, message], (), reply=False) for message in (written, example)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("content", [[{"type": "image", "image": "cat.png"}], 7])
def test_what_is_not_text_is_refused(chatml, content):
    with pytest.raises(Exception, match="text only|not iterable"):
        chatml.apply_template([{"role": "user", "content": content}], [], False, {})
