"""Templates that write tool calls themselves: what follows a call is exact whatever closes it, or it is refused."""

from collections.abc import Callable

import pytest
from chat_families import SCHEMA, Family, Talk, call_text

from turnwise.chat.formats import hermes
from turnwise.chat.render_alignment import render_problem
from turnwise.chat.renderer import CallForm, Renderer
from turnwise.chat.template.history import WordsRefused
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config.choices import HistoryPolicy
from turnwise.errors import TemplateError
from turnwise.types import Message, Origin, RenderCheck, Role, Sample, StopReason, ToolCall, Trajectory

CONTROL = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|call>", "<call|>", "<|result>", "<result|>", "<q>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    *("<|im_start|>", "<|im_end|>", "<|calls|>", "<|/calls|>", "<|sep|>", "<|eot|>", "<|eom|>", "<|header|>"),
    *("<|user|>", "<|assistant|>", "<|observation|>"),
)
CALL = (
    '{%- macro call(c) -%}<|call>call:{{ c.function.name }}{{ "{" }}{% for k, v in c.function.arguments | items %}'
    '{{ k }}:<q>{{ v }}<q>{% endfor %}{{ "}" }}<call|>{%- endmacro -%}'
)
NESTED = (
    CALL + "{%- if tools -%}<|turn>system\n{{ tools | tojson }}<turn|>\n{% endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- if not loop.first and loop.previtem.role != 'tool' -%}<|turn>model\n{% endif -%}"
    "{%- for c in m.tool_calls or [] -%}{{ call(c) }}{%- endfor -%}"
    "{%- if m.tool_calls -%}OPEN{%- endif -%}"
    "{%- if m.content or not m.tool_calls -%}{{ m.content }}<turn|>\n{% endif -%}"
    "{%- elif m.role == 'tool' -%}"
    "{%- if loop.previtem.tool_calls or loop.previtem.role == 'tool' -%}RESULT{%- endif -%}"
    "{%- else -%}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' -%}<|turn>model\n{% endif -%}"
)
"""A result stands in the model's own turn, which nothing closes after a call."""
PLAIN_RESULT = "<|result>response:{{ m.name }}{{ m.content }}<result|>"
HARMONY = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' and m.tool_calls -%}"
    "{%- if m.tool_calls | length > 1 and STRICT -%}{{ raise_exception('one call at a time') }}{%- endif -%}"
    "<|start|>assistant to={{ m.tool_calls[0].function.name }}<|channel|>commentary<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{%- elif m.role == 'assistant' -%}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- elif m.role == 'tool' -%}"
    "{%- if not (loop.previtem.tool_calls or loop.previtem.role == 'tool') -%}{{ raise_exception('no call') }}{%- endif -%}"
    "<|start|>{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)


def chatml(calls: str, results: str, close: str = "<|im_end|>\n", before: str = "") -> str:
    """A template of the common kind that takes results only after calls."""
    return (
        "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
        "{%- if not (loop.previtem.tool_calls or loop.previtem.role == 'tool') -%}{{ raise_exception('no call') }}{%- endif -%}"
        + results
        + "{%- elif m.tool_calls -%}<|im_start|>assistant\n"
        + before
        + "{{ m.content }}"
        + calls
        + close
        + "{%- else -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
    )


EACH = "{%- for c in m.tool_calls -%}<|sep|>{{ c.function.name }}{{ c.function.arguments | tojson }}{%- endfor -%}"
RESULT = "<|im_start|>tool\n{{ m.content }}<|im_end|>\n{% if true %}{% endif -%}"
MERGED = (
    "{%- if loop.previtem.role != 'tool' -%}<|im_start|>tool\n{% else %}\n---\n{% endif -%}{{ m.content }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}<|im_end|>\n{% endif -%}"
)
SHAPES = {  # template, the end token that belongs after a call (None: nothing does)
    "nested": (NESTED.replace("OPEN", "").replace("RESULT", PLAIN_RESULT), "<call|>"),
    "nested, opened": (
        NESTED.replace("OPEN", "{%- if loop.last or loop.nextitem.role != 'tool' -%}<|result>{%- endif -%}").replace(
            "RESULT", PLAIN_RESULT
        ),
        "<|result>",
    ),
    "harmony": (HARMONY.replace("STRICT", "false"), "<|call|>"),
    "eot and eom": (chatml(EACH, RESULT, "<|eom|>\n{% if true %}{% endif -%}"), "<|eom|>"),
    "sections": (chatml("<|calls|>" + EACH + "<|/calls|>", RESULT), "<|im_end|>"),
    "merged results": (chatml(EACH, MERGED), "<|im_end|>"),
    "left open": (chatml(EACH, MERGED, ""), None),
    "left open, with a tag": (chatml(EACH + "</tool_call>", MERGED, ""), None),
    "observations": (
        "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
        "{%- if not (loop.previtem.tool_calls or loop.previtem.role == 'tool') -%}{{ raise_exception('no call') }}{%- endif -%}"
        "{%- if loop.previtem.role != 'tool' -%}<|observation|>{%- endif -%}\n{{ m.content }}"
        "{%- else -%}<|{{ m.role }}|>\n{{ m.content if not m.tool_calls else '' }}"
        "{%- for c in m.tool_calls or [] -%}{{ c.function.name }}\n{{ c.function.arguments | tojson }}{%- endfor -%}"
        "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>\n{%- endif -%}",
        None,
    ),
}
ROUNDS = {"one": (1,), "two": (1, 1), "two at once": (2,), "many": (1, 2, 1, 3)}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A renderer for a template's text."""
    folder = Family("qwen25", CONTROL, "<eos>", "<bos>").build(tmp_path_factory.mktemp("calls"))

    def build(text: str, history: HistoryPolicy = HistoryPolicy.refuse) -> Renderer:
        path = tmp_path_factory.mktemp("template") / "calls.jinja"
        path.write_text(text)
        return Renderer(Tokenizer(folder, str(path)), hermes, history=history)

    return build


def ask(talk: Talk, count: int, end: str | None, results: list[str] | None = None) -> None:
    """Make calls and append_replies what the tools say."""
    ids = talk.renderer.tokenizer.added_ids
    message = talk.say(call_text(count), None if end is None else ids[end])
    texts = results or [f"result {talk.turn} {number}" for number in range(count)]
    pairs = zip(message.tool_calls, texts, strict=True)
    talk.append_replies(*(Message(Role.TOOL, text, tool_call_id=call.id, name=call.name) for call, text in pairs))


def check_of(talk: Talk) -> RenderCheck:
    return talk.renderer.check(talk.ledger, talk.messages, talk.tools)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_stands_twice_and_nothing_is_missing(make, shape, rounds):
    """The ledger is the full render with the policy's own words in place of the template's spelling of them."""
    text, end = SHAPES[shape]
    tested = make(text)
    assert tested.call_form is CallForm.STRUCTURED
    talk = Talk(tested, [Message(Role.USER, "What is it?")])
    if shape == "harmony" and max(ROUNDS[rounds]) > 1:
        with pytest.raises(WordsRefused, match="does not show every tool call"):
            for count in ROUNDS[rounds]:
                ask(talk, count, end)
        return
    expected = tested.render(talk.messages, talk.tools, reply=True)
    for count in ROUNDS[rounds]:
        before = tested.render(talk.messages, talk.tools, reply=True)
        ask(talk, count, end)
        after = tested.render(talk.messages, talk.tools, reply=True)
        assert after.startswith(before.rstrip())
        alone = tested.render(talk.messages[:-count], talk.tools, reply=False)
        shown = alone.rstrip().removesuffix(end or "")
        assert after.startswith(shown)
        expected += call_text(count) + after[len(shown) :].strip("\n" if end is None else "")
    written = tested.tokenizer.decode(talk.ledger.token_ids)
    assert "".join(written.split()) == "".join(expected.split())
    for turn, count in enumerate(ROUNDS[rounds]):
        for number in range(count):
            assert written.count(f"result {turn} {number}") == 1
    assert written.count('"name": "probe", "arguments"') == sum(ROUNDS[rounds])
    talk.say("Done", talk.end_before(None))
    assert check_of(talk).problem is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "words", ["<|im_end|>", "<|call|><|start|>", " \n", "<call|>", "turnwiseXmark0X", "</tool_call>"]
)
def test_results_that_spell_control_tokens_stay_text(make, shape, words):
    tested = make(SHAPES[shape][0])
    tame, forging = (Talk(tested, [Message(Role.USER, "What is it?")]) for _ in range(2))
    for talk, text in ((tame, "x"), (forging, words)):
        ask(talk, 1, SHAPES[shape][1], [text])
        ask(talk, 1, SHAPES[shape][1], ["42"])
        talk.say("Done", talk.end_before(None))
        assert check_of(talk).problem is None
    special = tested.tokenizer.special_ids
    assert [i for i in tame.ledger.token_ids if i in special] == [i for i in forging.ledger.token_ids if i in special]


@pytest.mark.parametrize(
    ("shape", "end"), [("nested", "<turn|>"), ("nested, opened", "<turn|>"), ("harmony", "<|return|>")]
)
def test_an_end_that_the_template_would_not_keep_is_refused_or_declared(make, shape, end):
    text = SHAPES[shape][0]
    with pytest.raises(TemplateError, match="rewrites history"):
        ask(Talk(make(text), [Message(Role.USER, "What is it?")]), 1, end)
    talk = Talk(make(text, HistoryPolicy.verbatim), [Message(Role.USER, "What is it?")])
    ask(talk, 1, end)
    ask(talk, 1, end)
    written = talk.renderer.tokenizer.decode(talk.ledger.token_ids)
    assert written.count("result 0 0") == written.count("result 1 0") == 1
    assert written.count('"arguments"') == 2 and "call:probe" not in written and "to=probe" not in written
    following = Talk(make(text, HistoryPolicy.segment), [Message(Role.USER, "What is it?")])
    ask(following, 1, end)
    assert len(following.segments) == 2
    following.say("Done", following.end_before(None))
    assert check_of(following).problem is None


@pytest.mark.parametrize("shape", SHAPES)
def test_a_call_that_is_cut_short_or_ended_otherwise_is_never_written_twice(make, shape):
    for end in (None, "<eos>"):
        talk = Talk(make(SHAPES[shape][0]), [Message(Role.USER, "What is it?")])
        ask(talk, 1, end)
        ask(talk, 1, end)
        written = talk.renderer.tokenizer.decode(talk.ledger.token_ids)
        assert written.count('"arguments"') == 2
        assert written.count("result 0 0") == written.count("result 1 0") == 1
        assert "call:probe" not in written and "to=probe" not in written
        talk.say("Done", talk.end_before(None))
        assert check_of(talk).problem is None


@pytest.mark.parametrize("words", [call_text(1), "<tool_call>\n</tool_call>", f"Look: {call_text(2)}"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_episode_may_end_with_calls_that_nobody_answered(make, shape, words):
    """A budget ends it so; what the template would make of the calls, no model saw."""
    for end in (SHAPES[shape][1], None):
        talk = Talk(make(SHAPES[shape][0]), [Message(Role.USER, "What is it?")])
        ask(talk, 1, SHAPES[shape][1])
        message = talk.say(words, None if end is None else talk.renderer.tokenizer.added_ids[end])
        assert message.tool_calls and check_of(talk).problem is None


def test_words_that_the_template_moves_behind_the_result_end_the_episode(make):
    text = NESTED.replace("OPEN", "").replace("RESULT", PLAIN_RESULT)
    moved = text.replace(
        "{%- if m.content or not m.tool_calls -%}", "{%- if (m.content and loop.last) or not m.tool_calls -%}"
    )
    talk = Talk(make(moved), [Message(Role.USER, "What is it?")])
    talk.say("Let me see. " + call_text(1), None)
    with pytest.raises(WordsRefused, match="does not fit"):
        talk.append_replies(Message(Role.TOOL, "42", tool_call_id="t000c0000", name="probe"))


REORDERED = chatml("", "{{ '' }}").replace(
    "{{ m.content }}<|im_end|>\n{% else",
    "{{ loop.nextitem.content if loop.nextitem else '' }}" + EACH + "<|im_end|>\n{% else",
)
FORGETFUL = chatml(
    EACH,
    RESULT,
    before="{%- if m.reasoning_content and loop.index0 > messages | length - 3 -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}",
)


def test_a_template_that_puts_the_result_before_the_call_is_refused(make):
    talk = Talk(make(REORDERED), [Message(Role.USER, "What is it?")])
    with pytest.raises(TemplateError):
        ask(talk, 1, "<|im_end|>")


def test_a_template_that_forgets_earlier_thoughts_is_refused_once_it_does(make):
    talk = Talk(make(FORGETFUL), [Message(Role.USER, "What is it?")])

    def ponder() -> None:
        message = talk.say("<think>hm</think>" + call_text(1), talk.end_before(None))
        talk.append_replies(Message(Role.TOOL, "42", tool_call_id=message.tool_calls[0].id, name="probe"))

    ponder()
    with pytest.raises(TemplateError, match="rewrites history"):
        ponder()


LATE = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}{{ ' (old)' if loop.index < messages | length - 9 else '' }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
DOTTED = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ '\n' if messages | length > 13 and m.role == 'user' else '' }}"
    "{{ m.content }}<|im_end|>\n{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


@pytest.mark.parametrize("template", [LATE, DOTTED], ids=["marks old messages", "adds a line"])
def test_what_a_template_rewrites_later_than_anyone_tried_is_told(make, template):
    """Trying the template out goes only so far; the comparison with a full render sees the rest."""
    tested = make(template)
    talk = Talk(tested, [Message(Role.USER, "What is it?")])
    try:
        for _ in range(9):
            talk.answer_and_hear_user("It is so.", "Sure?")
    except TemplateError as error:
        assert "rewrites history" in str(error)
        return
    talk.say("Done", talk.end_before(None))
    check = check_of(talk)
    assert not check.same_text and check.problem is not None
    assert "a full render has" in check.problem and "token" in check.problem


def trajectory(number: int, problem: str | None, reason: StopReason = StopReason.ANSWERED) -> Trajectory:
    sample = Sample(f"s{number}", (Message(Role.USER, "hello"),), "x")
    check = RenderCheck(problem is None, False, None if problem is None else 7, problem)
    return Trajectory(sample, 0, 0, [], [], [], reason, 0.0, render_check=check)


def test_faulty_records_are_told_with_their_number_and_the_first_of_them():
    assert render_problem([trajectory(0, None)]) is None
    assert render_problem([trajectory(0, "at token 7", StopReason.FAILED)]) is None, (
        "failed episodes are told of as such"
    )
    told = render_problem(
        [trajectory(0, None), trajectory(1, "at token 7 (turn 0): recorded is 'a'"), trajectory(2, "at token 9")]
    )
    assert told is not None and told.startswith("2 of 3 checked episodes") and "'s1'" in told and "at token 7" in told


def test_a_duplicated_context_is_a_fault_of_the_record(make):
    """What the self-check is for, whatever caused it: the template's text stands in the ledger twice."""
    tested = make(SHAPES["nested"][0])
    talk = Talk(tested, [Message(Role.USER, "What is it?")])
    ask(talk, 1, "<call|>")
    again = tested.tokenizer.encode("<|turn>model\n<|call>call:probe{x:<q>0<q>}<call|>").ids
    talk.ledger.append(again, Origin.TEMPLATE, 0)
    talk.say("Done", talk.end_before(None))
    problem = check_of(talk).problem
    assert problem is not None and "call:probe" in problem


def test_every_schema_is_shown_where_the_template_shows_tools(make):
    tested = make(SHAPES["nested"][0])
    assert '"Look something up."' in tested.render([Message(Role.USER, "hello")], [SCHEMA], reply=True)


@pytest.mark.parametrize("name", ["plain", "qwen25"])
def test_calls_of_a_prompt_are_shown_also_by_a_template_that_shows_none(
    name: str, renderer: Callable[..., Renderer]
) -> None:
    shown = renderer(name)
    asking = Message(Role.ASSISTANT, "Wait.", (ToolCall("c1", "f", {"x": 1}),))
    text = shown.render([Message(Role.USER, "a"), asking, Message(Role.TOOL, "2", name="f")], (), reply=True)
    assert shown.template.hides_calls is (name == "plain")
    assert text.count('{"name": "f", "arguments": {"x": 1}}') == 1 and "Wait." in text
