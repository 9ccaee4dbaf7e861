"""What trying a template out finds: how calls and reasoning are put to it, what ends a message, what depends on history."""

from dataclasses import replace

import pytest
from chat_families import FAMILIES, SCHEMA, TEMPLATES, Talk

from turnwise.chat.formats import hermes
from turnwise.chat.renderer import CallForm, Renderer
from turnwise.chat.template.history import WordsRefused
from turnwise.chat.tokenizer import Tokenizer
from turnwise.errors import TemplateError
from turnwise.types import Completion, FinishReason, Image, Message, Origin, Role, Text, ToolCall

HELLO = Message(Role.USER, "hello")
RESULT = Message(Role.TOOL, "42", tool_call_id="t000c0000", name="probe")
CALLING = hermes.parse('<tool_call>{"name": "probe", "arguments": {"x": 1}}</tool_call>', turn=0, in_reasoning=False)
NOTHING = Completion.of((), (), FinishReason.LENGTH, version=0)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_calls_are_put_as_text_wherever_a_template_takes_it(renderer, name):
    assert renderer(name).call_form is (CallForm.STRUCTURED if name == "mistral" else CallForm.RAW)


ENDS = {
    "qwen25": ("<|im_end|>", {"<|im_end|>"}),
    "llama3": ("<|eot_id|>", {"<|eot_id|>", "<|end_of_text|>"}),
    "mistral": ("</s>", {"</s>"}),
    "gemma": ("<end_of_turn>", {"<end_of_turn>", "<eos>"}),
    "phi": ("<|end|>", {"<|end|>", "<|endoftext|>"}),
    "plain": ("<|endoftext|>", {"<|endoftext|>"}),
    "unclosed": ("<|im_end|>", {"<|im_end|>", "<|endoftext|>"}),
    "json_tools": ("<|im_end|>", {"<|im_end|>"}),
    "harmony": ("<|end|>", {"<|end|>", "<|return|>"}),
    "llama2": ("</s>", {"</s>"}),
}


@pytest.mark.parametrize("name", ENDS)
def test_end_tokens_are_those_of_tokenizer_and_template(renderer, name):
    tested = renderer(name)
    own, stops = ENDS[name]
    assert tested.tokenizer.decode([tested.end_id]) == own
    assert {tested.tokenizer.decode([token]) for token in tested.stop_ids} == stops


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("qwen25", {Role.TOOL, Role.USER}),
        ("llama3", {Role.TOOL, Role.USER}),
        ("mistral", {Role.TOOL, Role.USER}),
        ("qwen3", {Role.TOOL}),
        ("rounds", set()),
        ("deepseek_r1", set()),
    ],
)
def test_only_templates_that_look_back_are_shown_the_whole_history(renderer, name, roles):
    template = renderer(name).template
    history = [Message(Role.SYSTEM, "s"), HELLO, CALLING, RESULT, Message(Role.ASSISTANT, "yes", answer="yes"), HELLO]
    for role in (Role.TOOL, Role.USER):
        assert template.first_prompt(history, [Message(role, "x")]) == (history[:2] if role in roles else None)
    assert template.first_prompt([Message(Role.ASSISTANT, "Welcome.")], [HELLO]) is None


def test_a_template_that_counts_is_followed_through_many_rounds(talk):
    conversation = talk("rounds")
    for _ in range(3):
        conversation.call_and_hear_tools("", ["a", "b"])
        conversation.answer_and_hear_user("It is so.", "Sure?")
    glue = conversation.text_of(Origin.TEMPLATE)
    assert [f"[Result {number}]" in glue for number in range(1, 8)] == [True] * 6 + [False]
    assert "[Round 4]" in glue and "[Round 5]" not in glue


@pytest.mark.parametrize("name", ["both_tags", "no_tags"])
def test_reasoning_that_the_header_opened_is_put_as_the_template_wants_it(talk, name):
    conversation = talk(name)
    for _ in range(2):
        conversation.call_and_hear_tools("hm\n</think>\n\n", ["42"])
        conversation.answer_and_hear_user("so\n</think>\n\nIt is 42.", "Sure?")
    conversation.say("yes\n</think>\n\nYes.", conversation.end_before(None))
    assert conversation.messages[-1].reasoning == "yes"
    assert conversation.renderer.check(conversation.ledger, conversation.messages, conversation.tools).exact


@pytest.mark.parametrize("name", ["both_tags", "no_tags"])
def test_a_thought_that_the_policy_opens_again_is_shown_once_and_recorded_as_it_was_sampled(talk, name):
    conversation = talk(name)
    conversation.answer_and_hear_user("<think>again</think>\n\nYes.", "Sure?")
    assert (conversation.messages[-2].reasoning, conversation.messages[-2].answer) == ("again", "Yes.")
    shown = conversation.renderer.render(conversation.messages, (), reply=False)
    assert shown.count("<think>") == shown.count("</think>") == 1
    assert conversation.text_of(Origin.POLICY).startswith("<think>again</think>\n\nYes.")
    conversation.call_and_hear_tools("\n<think>hm</think>\n\n", ["42"])
    conversation.say("yes\n</think>\n\nYes.", conversation.end_before(None))
    written = conversation.renderer.tokenizer.decode(conversation.ledger.token_ids)
    assert written.count("<think>") == 5, "three headers, and two that were sampled"
    check = conversation.renderer.check(conversation.ledger, conversation.messages, conversation.tools)
    assert not check.exact and check.problem is None, "the difference is the policy's own"


def test_a_thought_that_the_policy_opens_where_the_header_did_not_is_not_opened_twice(folder, tmp_path):
    """Some templates open a thought after a user and none after a tool."""
    path = tmp_path / "after_users.jinja"
    path.write_text(
        (TEMPLATES / "both_tags.jinja")
        .read_text()
        .removesuffix("\n")
        .replace("assistant\\n<think>\\n", 'assistant\\n" + ("<think>\\n" if messages[-1].role != "tool" else "") + "')
    )
    tested = Renderer(Tokenizer(folder("both_tags"), str(path)), hermes)
    conversation = Talk(tested, [HELLO])
    conversation.call_and_hear_tools("hm\n</think>\n\n", ["42"])
    assert not tested.tokenizer.decode(conversation.ledger.token_ids).endswith("<think>\n")
    conversation.answer_and_hear_user("<think>\nso\n</think>\n\nIt is 42.", "Sure?")
    conversation.say("yes\n</think>\n\nYes.", conversation.end_before(None))
    assert tested.check(conversation.ledger, conversation.messages, conversation.tools).exact


def test_structured_calls_stand_where_the_policys_words_stood(talk):
    conversation = talk("mistral")
    conversation.call_and_hear_tools(" Let me see. ", ['say "hi"', "line\nbreak </s>"])
    told = conversation.text_of(Origin.TOOL)
    assert 'say \\"hi\\"' in told and "line\\nbreak </s>" in told
    glue = conversation.text_of(Origin.TEMPLATE)
    assert glue.count("[RESULTS]") == 2 and "[CALLS]" not in glue
    assert '"call_id": "t000c0001"' in glue
    conversation.say(" Done", conversation.end_before(None))
    ids = conversation.renderer.tokenizer.added_ids
    assert conversation.ledger.token_ids.tolist().count(ids["</s>"]) == 2


def test_an_unreadable_call_is_still_a_call_to_a_template_that_counts_them(talk):
    conversation = talk("mistral")
    message = conversation.say(' <tool_call>{"name": </tool_call>', conversation.end_before(Role.TOOL))
    assert message.tool_calls[0].problem
    conversation.append_replies(Message(Role.TOOL, "Error: not valid JSON", tool_call_id="t000c0000"))
    assert "not valid JSON" in conversation.text_of(Origin.TOOL)
    assert '[CALLS] [{"name": "unreadable"' in conversation.renderer.render(conversation.messages, (), reply=True)


def test_a_template_that_refuses_some_words_ends_the_episode(talk):
    conversation = talk("mistral")
    conversation.say("", conversation.end_before(Role.USER))
    with pytest.raises(WordsRefused, match="an assistant must say something"):
        conversation.append_replies(Message(Role.USER, "Sure?"))


def test_a_template_that_refuses_every_reply_of_a_kind_stops_the_run(talk):
    conversation = talk("gemma")
    conversation.say(CALLING.text, conversation.end_before(Role.USER))
    with pytest.raises(TemplateError, match=r"\[user, assistant, tool\]: user and assistant must alternate"):
        conversation.append_replies(RESULT)


def test_a_role_the_template_does_not_know_is_named(renderer):
    with pytest.raises(TemplateError, match=r"\[system, user\] without tools: there is no system role"):
        renderer("gemma").open([Message(Role.SYSTEM, "Be brief."), HELLO], ())


def test_two_users_in_a_row_are_refused_by_templates_that_alternate(talk):
    conversation = talk("mistral")
    conversation.say(" It is so.", conversation.end_before(Role.USER))
    with pytest.raises(TemplateError, match="roles must alternate"):
        conversation.append_replies(Message(Role.USER, "Sure?"), Message(Role.USER, "Hm?"))


def test_a_template_that_hides_what_tools_reply_is_not_used(talk):
    conversation = talk("deaf")
    conversation.say(CALLING.text, conversation.end_before(Role.TOOL))
    with pytest.raises(TemplateError, match="does not show what a tool replies"):
        conversation.append_replies(RESULT)


def test_an_empty_reply_is_a_reply(talk):
    conversation = talk("qwen25")
    conversation.call_and_hear_tools("", ["", ""])
    assert conversation.text_of(Origin.TOOL) == ""
    assert conversation.text_of(Origin.TEMPLATE).count("<tool_response>") == 2


@pytest.mark.parametrize("name", ["json_tools", "plain", "gemma"])
def test_a_template_that_ignores_tools_can_be_told_by_its_text(renderer, name):
    tested = renderer(name)
    assert tested.render([HELLO], [SCHEMA], reply=True) == tested.render([HELLO], (), reply=True)


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama3", "mistral"])
def test_tools_are_shown_by_templates_that_know_them(renderer, name):
    assert '"Look something up."' in renderer(name).render([HELLO], [SCHEMA], reply=True)


def test_calls_of_a_message_the_policy_did_not_write_are_always_structured(renderer):
    """A worked example in a prompt: its text does not spell the calls."""
    example = Message(Role.ASSISTANT, "Let me see.", (ToolCall("t000c0000", "probe", {"x": 7}),))
    text = renderer("qwen25").render([HELLO, example, RESULT], (), reply=True)
    assert 'Let me see.\n<tool_call>\n{"name": "probe", "arguments": {"x": 7}}\n</tool_call>' in text
    written = renderer("qwen25").render([HELLO, CALLING, RESULT], (), reply=True)
    assert written.count("<tool_call>") == 1


def test_one_call_at_a_time_holds_for_structured_calls_only(renderer):
    two = replace(CALLING, content="", answer=None, tool_calls=CALLING.tool_calls * 2)
    with pytest.raises(TemplateError, match="one call at a time"):
        renderer("llama3").render([HELLO, two], (), reply=False)
    assert renderer("llama3").call_form is CallForm.RAW


def test_images_are_refused_not_dropped(renderer):
    seen = Message(Role.USER, (Text("What is this?"), Image("cat.png")))
    with pytest.raises(TemplateError, match="a message holds an image"):
        renderer("qwen25").open([seen], ())
    with pytest.raises(TemplateError, match="a message holds an image"):
        renderer("qwen25").extend([HELLO], CALLING, NOTHING, [replace(RESULT, content=seen.content)], ())
    spelled = replace(seen, content=(Text("<|im_end|>"), Image("cat.png")))
    with pytest.raises(TemplateError, match="a message holds an image"):
        renderer("qwen25").open([spelled], ())


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "does not show an assistant message exactly once"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "exactly once"),
        ("{{ messages[5].content.strip() }}", r"cannot render the roles \[user\]"),
        ("{% if %}", "cannot render"),
        ("{{ raise_exception('closed today') }}", "closed today"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_once(folder, tmp_path, template, problem):
    path = tmp_path / "broken.jinja"
    path.write_text(template)
    with pytest.raises(TemplateError, match=problem):
        Renderer(Tokenizer(folder("qwen25"), str(path)), hermes)


def test_a_template_that_writes_otherwise_around_some_replies_keeps_the_text(folder, tmp_path):
    """Where the reply cannot be told from what stands around it, all that differs counts as its words."""
    path = tmp_path / "shouting.jinja"
    path.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ '!' if m.content.endswith('!') else '' }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tested = Renderer(Tokenizer(folder("qwen25"), str(path)), hermes)
    conversation = Talk(tested, [HELLO])
    conversation.say("It is so.", tested.end_id)
    conversation.append_replies(Message(Role.USER, "No! <|im_end|>!"))
    assert "No! <|im_end|>!" in conversation.text_of(Origin.USER)
    assert tested.check(conversation.ledger, conversation.messages, ()).exact
    assert all(
        token not in tested.tokenizer.special_ids
        for o, _, ids in conversation.ledger.spans()
        if o is Origin.USER
        for token in ids
    )


def test_an_end_token_after_white_space_is_an_end_token(folder, tmp_path):
    path = tmp_path / "spaced.jinja"
    path.write_text((TEMPLATES / "unclosed.jinja").read_text().replace('"<|im_end|>', '" <|im_end|>'))
    tested = Renderer(Tokenizer(folder("unclosed"), str(path)), hermes)
    assert tested.tokenizer.decode([tested.end_id]) == "<|im_end|>"
    assert tested.end_id in tested.stop_ids


def test_a_reply_without_a_name_shows_none(folder, tmp_path):
    path = tmp_path / "named.jinja"
    path.write_text((TEMPLATES / "unclosed.jinja").read_text().replace('m.role + "\\n"', 'm.role ~ m.name ~ "\\n"'))
    tested = Renderer(Tokenizer(folder("unclosed"), str(path)), hermes)
    assert "<|im_start|>tool\n42" in tested.render([HELLO, replace(RESULT, name=None)], (), reply=False)
    assert "<|im_start|>toolprobe\n42" in tested.render([HELLO, RESULT], (), reply=False)


def test_calls_are_structured_for_templates_that_hide_results_otherwise(folder, tmp_path):
    path = tmp_path / "discreet.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role != 'tool' or loop.previtem.tool_calls %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert Renderer(Tokenizer(folder("qwen25"), str(path)), hermes).call_form is CallForm.STRUCTURED
