"""A completion keeps its arrays parallel; messages know what a reader takes as said."""

import pytest

from turnwise.types import Completion, FinishReason, Image, Message, Role, Text


def test_a_completion_with_misaligned_logprobs_cannot_exist() -> None:
    with pytest.raises(ValueError, match="2 tokens with 1 logprobs"):
        Completion.of((1, 2), (0.0,), FinishReason.STOP, version=0)


def test_text_and_visible() -> None:
    assert Message(Role.USER, (Text("a "), Image("cat.png"), Text("b"))).text == "a b"
    assert Message(Role.ASSISTANT, "<think>x</think>42", answer="42").visible == "42"
    assert Message(Role.ASSISTANT, "42", answer="").visible == "", "an answer of nothing is nothing"
    assert Message(Role.USER, "hello").visible == "hello"
