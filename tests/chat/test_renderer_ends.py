"""How a completion may end: by the template's end token, another one, a stop string, a limit, or before it began."""

import pytest
from chat_families import FAMILIES, completion

from turnwise.types import FinishReason, Message, Origin, Role

TALKERS = ("qwen25", "llama3", "gemma", "phi", "unclosed", "json_tools", "rounds", "glm", "harmony")


def suffix(conversation) -> str:
    """What the template and the user added after the policy's words."""
    ids, origins = conversation.ledger.token_ids, conversation.ledger.origins.tolist()
    last = max(i for i, origin in enumerate(origins) if origin in (Origin.PROMPT, Origin.POLICY))
    return conversation.renderer.tokenizer.decode(ids[last + 1 :])


@pytest.mark.parametrize("name", TALKERS)
@pytest.mark.parametrize("words", ["It is so.", "", "  ", "\n"])
def test_an_end_token_is_written_once(talk, name, words):
    """By the policy, or by the template when the policy was cut short or hit a stop string."""
    ended, cut = talk(name), talk(name)
    end = ended.end_before(Role.USER)
    for conversation, token in ((ended, end), (cut, None)):
        message = conversation.say(words, token)
        assert message.text == words, "the end token is not part of the words"
        conversation.append_replies(Message(Role.USER, "Sure?"))
    text = ended.renderer.tokenizer.decode([end])
    assert suffix(cut).lstrip().startswith(text)
    assert suffix(ended).split() == suffix(cut).replace(text, "", 1).split()
    assert (ended.ledger.token_ids == end).sum() == (cut.ledger.token_ids == end).sum()
    if words == "It is so.":
        assert ended.ledger.token_ids.tolist() == cut.ledger.token_ids.tolist()
        assert cut.ledger.loss_mask.sum() == ended.ledger.loss_mask.sum() - 1


@pytest.mark.parametrize("name", [name for name in TALKERS if FAMILIES[name].eos not in ("<|im_end|>", "<|return|>")])
def test_another_end_token_is_kept_and_the_templates_own_follows(talk, name):
    conversation = talk(name)
    other = conversation.renderer.tokenizer.added_ids[FAMILIES[name].eos]
    proper = conversation.end_before(Role.USER)
    assert other != proper and {other, proper} <= conversation.renderer.stop_ids
    message = conversation.say("It is so.", other)
    assert message.text == "It is so."
    conversation.append_replies(Message(Role.USER, "Sure?"))
    assert conversation.ledger.token_ids[conversation.ledger.loss_mask][-1] == other
    assert suffix(conversation).startswith(conversation.renderer.tokenizer.decode([proper]))
    check = conversation.renderer.check(conversation.ledger, conversation.messages, conversation.tools)
    assert not check.exact and not check.same_text and check.position is not None


def test_white_space_that_a_template_puts_before_the_end_token_is_not_written_after_it(talk):
    conversation = talk("llama2")
    conversation.say(" It is so.", conversation.end_before(Role.USER))
    conversation.append_replies(Message(Role.USER, "Sure?"))
    assert conversation.renderer.tokenizer.decode(conversation.ledger.token_ids).endswith(
        "It is so.</s><s>[INST] Sure? [/INST]"
    )


def test_a_role_that_ends_the_message_before_it_is_an_end_token(talk):
    conversation = talk("glm")
    stops = {conversation.renderer.tokenizer.decode([i]) for i in conversation.renderer.stop_ids}
    assert stops == {"<|endoftext|>", "<|user|>", "<|observation|>"}
    conversation.say("It is so.", conversation.end_before(Role.TOOL))  # expects a tool, but a user replies
    conversation.append_replies(Message(Role.USER, "Sure?"))
    assert suffix(conversation) == "<|user|>\nSure?<|assistant|>\n"


@pytest.mark.parametrize("name", TALKERS)
def test_a_last_message_is_exact_whether_it_was_ended_or_cut(talk, name):
    for words in ("It is so.", ""):
        for token in (talk(name).end_before(None), None):
            conversation = talk(name)
            conversation.say(words, token)
            assert conversation.renderer.check(conversation.ledger, conversation.messages, conversation.tools).exact


def test_an_empty_completion_is_an_empty_message(talk):
    conversation = talk("qwen25")
    nothing = completion(conversation.renderer, "", None)
    assert not nothing.token_ids.size and nothing.finish_reason is FinishReason.LENGTH
    message = conversation.renderer.read(nothing, 0)
    assert (message.text, message.answer, message.tool_calls, message.reasoning) == ("", "", (), None)


def test_a_completion_cut_inside_a_character_keeps_its_tokens(talk):
    conversation = talk("qwen25")
    ids = conversation.renderer.tokenizer.encode("so 🦜").ids
    conversation.say("so 🦜", None)
    conversation.segments[-1] = conversation.ledger.prefix(len(conversation.ledger) - 2)
    conversation.last = type(conversation.last).of(ids[:-2], [0.0] * (len(ids) - 2), FinishReason.LENGTH, version=0)
    conversation.messages[-1] = conversation.renderer.read(conversation.last, 0)
    assert conversation.messages[-1].text == "so \ufffd"
    conversation.append_replies(Message(Role.USER, "What?"))
    assert suffix(conversation).startswith("<|im_end|>\n<|im_start|>user\nWhat?")


def test_control_tokens_in_the_middle_of_a_completion_stay_where_they_are(talk):
    conversation = talk("qwen25")
    ids = conversation.renderer.tokenizer.added_ids
    conversation.say("one<|im_start|>two", ids["<|im_end|>"])
    assert ids["<|im_start|>"] in conversation.last.token_ids
    conversation.append_replies(Message(Role.USER, "Sure?"))
    conversation.say("Yes", ids["<|im_end|>"])
    assert conversation.renderer.check(conversation.ledger, conversation.messages, conversation.tools).exact


def test_reasoning_that_the_header_opened_is_read_as_reasoning(talk):
    conversation = talk("deepseek_r1")
    renderer = conversation.renderer
    assert renderer.in_reasoning
    written = completion(renderer, "six sevens</think>It is 42.", None)
    for before in (None, conversation.ledger.token_ids):
        message = renderer.read(written, 0, before)
        assert (message.reasoning, message.answer) == ("six sevens", "It is 42.")
    unclosed = renderer.read(completion(renderer, "six sevens", None), 0, conversation.ledger.token_ids)
    assert (unclosed.reasoning, unclosed.answer) == ("six sevens", "")


def test_after_a_tool_some_templates_open_no_reasoning(talk):
    from turnwise.config.choices import HistoryPolicy

    conversation = talk("deepseek_r1", HistoryPolicy.verbatim)
    conversation.call_and_hear_tools("hm</think>", ["42"])
    message = conversation.say("It is 42.", conversation.end_before(Role.USER))
    assert (message.reasoning, message.answer) == (None, "It is 42.")
    conversation.append_replies(Message(Role.USER, "Sure?"))
    message = conversation.say("hm</think>Yes.", conversation.end_before(None))
    assert (message.reasoning, message.answer) == ("hm", "Yes.")


@pytest.mark.parametrize(
    ("name", "kwargs", "opened"),
    [
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
        ("qwen25", {}, False),
        ("both_tags", {}, True),
        ("no_tags", {}, True),
    ],
)
def test_only_an_open_think_block_in_the_header_counts(renderer, name, kwargs, opened):
    assert renderer(name, **kwargs).in_reasoning is opened
