"""Frames: the tokens of a turn that is filled into a frame are those that the template's own rendering gives."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from chat_families import FAMILIES, SCHEMA, Talk, call_text

from turnwise.chat.renderer import History, Renderer
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


def play(talk: Talk, turns: list[tuple[str, Any, bool]], system: bool) -> list[Any]:
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


@pytest.mark.parametrize("history", list(History))
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "dated"])
def test_frames_give_the_same_ledgers_as_rendering(
    renderer: Callable[..., Renderer], name: str, history: History
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
        found, wanted = (play(Talk(one, asked, tools), turns, bool(prompt)) for one in (framed, plain))
        assert found == wanted
    print(name, history, framed.frames.filled - filled, dict(framed.frames.rendered))


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
