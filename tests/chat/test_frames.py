"""Frames: the tokens of a turn that is filled into a frame are those that the template's own rendering gives."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from chat_families import APPENDING, FAMILIES, SCHEMA, Talk, call_text

from turnwise.chat.renderer import Renderer
from turnwise.chat.template.analysis import clock_formats, compared_words
from turnwise.chat.template.text_changes import Kinds
from turnwise.config.choices import HistoryPolicy
from turnwise.errors import EpisodeError, TemplateError
from turnwise.types import Message, Role

WORDS = (
    "yes", "It is 42.", " lead", "trail \n", "\n\n", "", "42", '{"a": [1, "b"]}', "a\nb\n\n c", "naïve 東京 🙂", "Error: no",
    "<|im_end|> forged", "<tool_response>\nx\n</tool_response>", "</tool_response>", "a <think> b", "x</think>y", "\\n \"q\"",
    "{{ x }} {% y %}", "ipython", "Be of help.", "[INST] </s> <s>", "turnwiseXmark0X", "user", "assistant\n", "<think></think>",
)  # fmt: skip
THOUGHTS = (
    "",
    "",
    "hm\n</think>\n\n",
    "<think>\nhm\n</think>\n\n",
    "<think>a</think>b<think>c</think>",
    "<think>\nnever closed ",
)


def script(rng: random.Random, family: str, turns: int) -> list[tuple[str, Any, bool]]:
    """(what the policy says, what is replied, whether it wrote an end token) for each turn."""
    made = []
    for _ in range(turns):
        ended = rng.random() < 0.9
        said = rng.choice(THOUGHTS) + " ".join(rng.choices(WORDS, k=rng.randint(0, 2)))
        if FAMILIES[family].lead and rng.random() < 0.7:
            said = FAMILIES[family].lead + said
        if rng.random() < 0.6:
            replies = ["; ".join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
            made.append((said + call_text(len(replies)), replies, ended))
        else:
            made.append((said, rng.choice(WORDS), ended))
    return made


def play(talk: Talk, turns: list[tuple[str, Any, bool]]) -> list[Any]:
    """Every segment's tokens, origins and turns, and what stopped the talk if anything did."""
    stopped = ""
    try:
        for said, reply, ended in turns:
            role = Role.TOOL if isinstance(reply, list) else Role.USER
            message = talk.say(said, talk.end_before(role) if ended else None)
            if role is Role.TOOL:
                # A call that is only thought about is none: then the tool is replaced by a user.
                if not message.tool_calls:
                    talk.append_replies(Message(Role.USER, reply[0]))
                    continue
                texts = [reply[n % len(reply)] for n in range(len(message.tool_calls))]
                pairs = zip(message.tool_calls, texts, strict=True)
                talk.append_replies(
                    *(Message(Role.TOOL, text, tool_call_id=call.id, name=call.name or None) for call, text in pairs)
                )
            else:
                talk.append_replies(Message(Role.USER, reply))
    except (TemplateError, EpisodeError) as error:
        stopped = f"{type(error).__name__}: {error}"
    ledgers = [(list(s.token_ids), list(s.origins), list(s.turns), list(s.logprobs)) for s in talk.segments]
    return [stopped, len(talk.messages), *ledgers]


@pytest.mark.parametrize("history", list(HistoryPolicy))
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "dated"])
def test_frames_give_the_same_ledgers_as_rendering(
    renderer: Callable[..., Renderer], name: str, history: HistoryPolicy
) -> None:
    framed = renderer(name, history)
    assert framed.frames is not None
    plain = Renderer(framed.tokenizer, framed.call_format, history=history)
    plain.frames = None
    filled = framed.frames.filled
    rng = random.Random(f"{name}/{history}")
    prompt = [Message(Role.SYSTEM, "Be brief.")] * FAMILIES[name].system
    for number in range(12):
        asked = [*prompt, Message(Role.USER, "What is it?" if number % 3 else rng.choice(WORDS))]
        turns = script(rng, name, 8) if number % 2 else easy(rng, name)
        tools = (SCHEMA,) if number % 4 else ()
        found, wanted = (play(Talk(one, asked, tools), turns) for one in (framed, plain))
        assert found == wanted
    if name in APPENDING and name != "rounds":  # which counts: its turns are all rendered
        assert framed.frames.filled > filled
    if name == "qwen25" and history is HistoryPolicy.refuse:
        assert framed.frames.repeated, "what was replied before is not encoded again"


def easy(rng: random.Random, name: str) -> list[tuple[str, Any, bool]]:
    """Turns as a trained policy makes them, so that few of them stop a strict template."""
    lead = FAMILIES[name].lead
    made: list[tuple[str, Any, bool]] = []
    for number in range(8):
        if FAMILIES[name].tools and number % 3 < 2:
            made.append((f"{lead}Step {number}.\n" + call_text(1), [f"The value is {rng.randint(0, 9)}."], True))
        else:
            made.append((f"{lead}It is {rng.randint(0, 99)}.", f"Are you sure, {number}?", True))
    return made


@pytest.mark.parametrize(
    ("name", "role", "trims"),
    [("llama3", Role.TOOL, True), ("qwen25", Role.USER, False), ("json_tools", Role.TOOL, "encodes")],
)
def test_a_kind_of_message_is_known_by_what_its_template_does_to_it(
    renderer: Callable[..., Renderer], name: str, role: Role, trims: bool | str
) -> None:
    """Trimmed, shown as it is, or encoded."""
    template = renderer(name).template
    source = "".join(renderer(name).tokenizer.templates.values())
    found = Kinds(template, compared_words(source), [Message(Role.USER, "Well?")], [SCHEMA]).reply(role)
    assert ("encodes" if found is None else found.trims) == trims


def test_words_that_are_only_written_out_are_not_looked_for() -> None:
    source = (
        "{% for m in messages %}{{ '<|start|>' + m.role + '\\n' }}{% if m['role'] == 'user' %}{{ 'U: ' }}{% endif %}"
        "{% if '</think>' in m.content %}{{ m.content.split('###')[-1] }}{% else %}{{ m.content | replace('a', 'b') }}"
        "{% endif %}{% set tag = '[x]' %}{{ 'yes' if m.content.startswith('/no') else 'no' }}{% endfor %}"
    )
    assert compared_words(source) == ("###", "/no", "</think>", "[x]", "a", "b")
    assert compared_words("{% unheard of %}{{ 'x' + \"y\" }}") == ("x", "y")
    assert clock_formats("{{ strftime_now('%d %b') }}{{ strftime_now( \"%Y\" ) }}") == ["%d %b", "%Y"]
    assert clock_formats("{{ strftime_now(form) }}") is None and clock_formats("{{ x }}") == []


def test_turns_that_a_frame_cannot_hold_are_counted_by_reason(talk: Callable[..., Talk]) -> None:
    conversation = talk("json_tools")
    frames = conversation.renderer.frames
    assert frames is not None
    reason = "what a tool replies is not shown as written"
    before, filled = frames.rendered[reason], frames.filled
    for number in range(3):
        conversation.call_and_hear_tools("", [f"it's {number}"])
        conversation.answer_and_hear_user("It is so.", f"Sure, {number}?")
    assert frames.rendered[reason] == before + 3 and frames.filled >= filled + 2
