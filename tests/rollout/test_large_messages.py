"""Megabytes of text: seen to be too long without encoding them, or encoded where nobody waits for it."""

import asyncio
import threading

import pytest

from turnwise.chat.tokenizer import LONG, Tokenizer
from turnwise.rollout import large_messages
from turnwise.types import Message, Role, StopReason


async def asks_much(chat):
    chat.reprompt([Message(Role.USER, "far too long " * 500_000)])
    await chat.generate()


async def adds_much(chat):
    await chat.generate()
    chat.add([Message(Role.USER, "far too long " * 500_000)])
    await chat.generate()


@pytest.mark.parametrize("loop", [asks_much, adds_much])
def test_what_no_context_holds_is_not_encoded(rollouts, monkeypatch, loop):
    longest = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **more: longest.append(len(text)) or encode(self, text, **more)
    )
    found = rollouts.make(["ok"], agent=f"{__file__}:{loop.__name__}", context_length=4096).play()
    assert found.stop_reason is StopReason.CONTEXT_FULL and found.failure is None
    assert len(found.turns) == (loop is adds_much) and max(longest, default=0) < 1_000_000


async def adds_a_page(chat):
    await chat.generate()
    chat.add([Message(Role.USER, "a page of words " * 20)])
    await chat.generate()


def test_a_large_message_is_put_to_the_model_in_a_thread_and_the_tokens_are_the_same(rollouts, monkeypatch):
    rollout = rollouts.make(["ok", "fine"], agent=f"{__file__}:adds_a_page")
    plain, places = rollout.play(), []
    renderer = type(rollouts.renderer)
    for name in ("prompt", "extend"):
        monkeypatch.setattr(renderer, name, noting(getattr(renderer, name), places))
    monkeypatch.setattr(large_messages, "LARGE", 20)
    found = rollouts.make(["ok", "fine"], agent=f"{__file__}:adds_a_page").play()
    assert found.stop_reason is plain.stop_reason and len(found.turns) == 2
    assert found.segments[0].token_ids.tolist() == plain.segments[0].token_ids.tolist()
    assert places and threading.main_thread() not in places


def noting(method, places):
    def called(*args, **kwargs):
        places.append(threading.current_thread())
        return method(*args, **kwargs)

    return called


def test_a_thread_that_encodes_a_long_text_leaves_the_event_loop_alone(rollouts):
    tokenizer, text = rollouts.renderer.tokenizer, "hello world, this is 42. " * 60_000
    assert len(text) > LONG
    short = text[: LONG // 2]
    assert tokenizer.encode(short).ids == tokenizer._backend.encode_batch([short], add_special_tokens=False)[0].ids

    async def main():
        work, ticks = asyncio.create_task(asyncio.to_thread(tokenizer.encode, text)), 0
        while not work.done():
            await asyncio.sleep(0.001)
            ticks += 1
        return ticks, work.result()

    ticks, found = asyncio.run(main())
    assert ticks > 20 and len(found.ids) > 60_000
