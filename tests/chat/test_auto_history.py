"""chat.history=auto over templates in use: what it appends, keeps and follows, and that every prompt is the template's."""

from pathlib import Path
from typing import Any

import pytest
from chat_families import SCHEMA, TEMPLATES, Talk
from public_templates import save_tokenizer

from turnwise.chat.calls.detect_format import find_format
from turnwise.chat.calls.tool_format import load_format
from turnwise.chat.renderer import Renderer
from turnwise.chat.template.history_forecast import TemplateForecast, forecast
from turnwise.chat.template.message_forms import CallForm
from turnwise.chat.template.trials import Course
from turnwise.chat.tokenizer import Tokenizer
from turnwise.config.choices import HistoryPolicy
from turnwise.types import Message, Origin, Role, ToolCall

PROMPT = [Message(Role.SYSTEM, "Be brief."), Message(Role.USER, "What is it?")]


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Tokenizer] = {}

    def build(name: str, history: HistoryPolicy = HistoryPolicy.auto, **kwargs: Any) -> Renderer:
        if name not in made:
            made[name] = Tokenizer(save_tokenizer(name, tmp_path_factory.mktemp(name)))
        call_format = load_format(find_format(None, made[name], kwargs).name)
        return Renderer(made[name], call_format, history=history, template_kwargs=kwargs)

    return build


def foreseen(renderer: Renderer, *, user: bool) -> TemplateForecast:
    return forecast(renderer, PROMPT, (SCHEMA,), tools=True, user=user, media={})


def courses(found: TemplateForecast) -> dict[str, Course]:
    return {one.name: one.course for one in found.tried}


def test_a_template_that_only_appends_is_followed_as_ever(public):
    found = foreseen(public("qwen3_instruct_2507"), user=True)
    assert found.only_appends and not found.warns and "only appends" in found.text


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("qwen3", None),
        ("gptoss", None),
        ("qwen3_6", "preserve_thinking: true"),
        ("nemotron_3_nano", "truncate_history_thinking: false"),
    ],
)
def test_thoughts_that_a_user_makes_vanish_open_a_sequence_and_the_plan_says_so(public, name, switch):
    found = foreseen(public(name), user=True)
    assert found.reopens(Role.USER) and not found.reopens(Role.TOOL) and not found.warns
    assert "drops thoughts of the policy when a user speaks" in found.text
    if switch is None:
        assert found.switch is None
    else:
        assert f"chat.template_kwargs={{{switch}}}" in found.text
        assert foreseen(public(name, **dict([found.switch])), user=True).only_appends
    assert foreseen(public(name), user=False).only_appends


def test_an_empty_thought_of_the_header_that_vanishes_is_kept(public):
    """Qwen3 that is told not to think: no token of the policy's changes, and no tool result opens a sequence."""
    found = foreseen(public("qwen3", enable_thinking=False), user=False)
    assert set(courses(found).values()) <= {Course.APPENDS, Course.KEEPS}
    assert courses(found)["1 tool call(s), then the tool"] is Course.KEEPS
    assert not found.warns and "sampled tokens are kept" in found.text


def test_an_empty_thought_of_the_policys_own_is_not_taken_for_the_headers(public):
    talk = Talk(public("qwen3"), PROMPT)
    talk.answer_and_hear_user("<think>\n\n</think>\n\nIt is so.", "Sure?")
    assert len(talk.segments) == 2, "the template drops what it wrote"
    quiet = Talk(public("qwen3", enable_thinking=False), PROMPT)
    quiet.answer_and_hear_user("It is so.", "Sure?")
    assert len(quiet.segments) == 1, "the template drops what the header wrote"
    check = quiet.renderer.check(quiet.ledger, quiet.messages, quiet.tools)
    assert not check.exact and check.problem is None, "which the self-check knows, and does not call exact"


def test_other_differences_are_not_excused_with_empty_thoughts(public):
    talk = Talk(public("qwen3", enable_thinking=False), PROMPT)
    talk.answer_and_hear_user("It is so.", "Sure?")
    wrong = [*talk.messages[:-1], Message(Role.USER, "Another question")]
    assert talk.renderer.check(talk.ledger, wrong, talk.tools).problem is not None


def test_thoughts_that_every_tool_result_makes_vanish_are_a_warning_with_the_growth(renderer):
    found = foreseen(renderer("deepseek_r1", HistoryPolicy.auto), user=False)
    assert found.reopens(Role.TOOL) and found.warns
    count, times = found.growth
    assert count == 5 and times > 1.5
    assert f"4 calls: 5 sequences, {times:.1f} times the tokens" in found.text


def test_a_thought_before_a_call_ends_no_run(public):
    """Qwen3.5 without thoughts: the header writes an empty one, and the policy thinks all the same."""
    found = foreseen(public("qwen3_5_nothink"), user=True)
    assert found.refused is None
    assert courses(found)["a thought and a tool call, then the tool"] is not Course.APPENDS
    strict = foreseen(public("qwen3_5_nothink", HistoryPolicy.refuse), user=False)
    assert "a thought and a tool call" in strict.refused and "rewrites history" in strict.refused


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v5"])
def test_a_call_of_gemma_4_ends_with_its_own_token(public, name):
    tested = public(name, HistoryPolicy.refuse)
    assert tested.tokenizer.decode([tested.call_end_id]) == "<|tool_response>"
    assert tested.tokenizer.decode([tested.end_id]) == "<turn|>"
    assert foreseen(tested, user=False).only_appends


def test_calls_of_others_end_as_the_template_ends_them(public, renderer):
    for name, end in (("qwen2_5", "<|im_end|>"), ("glm4moe", "<|observation|>"), ("gptoss", "<|call|>")):
        tested = public(name)
        assert tested.tokenizer.decode([tested.call_end_id]) == end, name


def test_the_call_form_is_one_in_which_a_second_call_can_be_made(folder, tmp_path):
    """As of Mistral: messages of an assistant with plain text must alternate with a user's, those with calls need not."""
    path = tmp_path / "alternating.jinja"
    counts = (
        "{%- set ns = namespace(at=0) -%}{%- for m in messages -%}"
        "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}"
        "{%- if (m.role == 'user') != (ns.at % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
        "{%- set ns.at = ns.at + 1 -%}{%- endif -%}{%- endfor -%}"
    )
    path.write_text(counts + (TEMPLATES / "mistral.jinja").read_text().removesuffix("\n"))
    tokenizer = Tokenizer(folder("mistral"), str(path))
    tested = Renderer(tokenizer, load_format("hermes"), history=HistoryPolicy.auto)
    assert tested.call_form is CallForm.STRUCTURED
    assert foreseen(tested, user=True).refused is None


@pytest.mark.parametrize("history", [HistoryPolicy.auto, HistoryPolicy.segment])
def test_a_rewritten_history_without_the_answers_is_refused_by_every_mode(folder, tmp_path: Path, history):
    path = tmp_path / "forgetful.jinja"
    path.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '' if m.role == 'assistant' else m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}".replace(
            "m.role == 'assistant'", "m.role == 'assistant' and not loop.last"
        )
    )
    tested = Renderer(Tokenizer(folder("qwen25"), str(path)), load_format("hermes"), history=history)
    assert "drops what the assistant said" in foreseen(tested, user=True).refused


def test_earlier_thoughts_are_looked_at_also_where_every_usual_message_is_rewritten(public):
    """A thought that is never closed stays, and the one before it goes: what came first was not looked at."""
    talk = Talk(public("nemotron_3_nano"), PROMPT)
    talk.answer_and_hear_user("hm\n</think>\n\nIt is so.", "Sure?")
    before = len(talk.segments)
    talk.answer_and_hear_user("never closed", "Go on.")
    talk.say("hm\n</think>\n\nYes.", talk.renderer.end_id)
    assert before == 2
    for ledger in talk.segments[-1:]:
        assert talk.renderer.check(ledger, talk.messages, talk.tools).problem is None


@pytest.mark.parametrize("name", ["gemma4_v5", "nemotron_3_nano", "qwen3_5_nothink"])
def test_words_before_a_call_that_a_template_moves_are_followed(public, name):
    talk = Talk(public(name), PROMPT)
    form = talk.renderer.call_format
    thought = form.render_thought("hm", is_open=talk.renderer.in_reasoning)
    for words in (thought, thought + "Well.\n", thought):
        message = talk.say(words + form.render_call(ToolCall("", "probe", {"x": "1"})), talk.renderer.call_end_id)
        talk.append_replies(
            *(Message(Role.TOOL, "42", tool_call_id=call.id, name="probe") for call in message.tool_calls)
        )
    talk.say(thought + "It is so.", talk.renderer.end_id)
    assert talk.renderer.check(talk.ledger, talk.messages, talk.tools).problem is None


@pytest.mark.parametrize("history", [HistoryPolicy.auto, HistoryPolicy.segment])
def test_a_thought_that_the_policy_opens_again_and_the_template_shows_once_is_followed(public, history):
    """The header wrote <think>, the policy too: a server shows one of them, and what is trained next begins so."""
    talk = Talk(public("qwen3_5_think", history), PROMPT)
    call = talk.renderer.call_format.render_call(ToolCall("", "probe", {"x": "1"}))
    for words in ("hm\n</think>\n\n", "<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n\n"):
        before = len(talk.segments)
        (asked,) = talk.say(words + call, talk.renderer.call_end_id).tool_calls
        talk.append_replies(Message(Role.TOOL, "42", tool_call_id=asked.id, name="probe"))
        assert len(talk.segments) - before == words.startswith("<think>")
        rendered = talk.renderer.render(talk.messages, talk.tools, reply=True)
        assert talk.renderer.tokenizer.decode(talk.ledger.token_ids) == rendered


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6"])
@pytest.mark.parametrize("history", [HistoryPolicy.auto, HistoryPolicy.segment, HistoryPolicy.verbatim])
def test_a_tool_response_that_a_user_writes_is_no_new_question(public, name, history):
    """These templates keep thoughts then, which they drop when the user says anything else in its place."""
    talk = Talk(public(name, history), PROMPT)
    thought = talk.renderer.call_format.render_thought("six sevens " * 20 + ".", is_open=talk.renderer.in_reasoning)
    told = "<tool_response>x</tool_response>"
    for _ in range(2):
        talk.answer_and_hear_user(f"{thought}It is so.", told)
    assert len(talk.segments) == 1 and talk.text_of(Origin.USER) == told * 2
    assert talk.renderer.tokenizer.decode(talk.ledger.token_ids) == talk.renderer.render(
        talk.messages, talk.tools, reply=True
    )


def test_marks_that_are_no_tokens_are_told(public, folder):
    ours = Renderer(Tokenizer(folder("gemma"), "chatml_hermes"), load_format("hermes"))
    assert ours.spelled_marks == ["<|im_start|>", "<|im_end|>"]
    assert public("qwen3").spelled_marks == []
