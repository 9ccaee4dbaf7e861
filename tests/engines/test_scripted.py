"""The scripted sampler: says what it is told, within the limits a sampler has."""

import asyncio

import pytest
from tiny_recipe import make_tokenizer
from written import write

from turnwise.chat.tokenizer import Tokenizer
from turnwise.engines.samplers.request import NoiseKey, SamplingParams
from turnwise.engines.samplers.scripted import ScriptedSampler, lines
from turnwise.errors import EngineError
from turnwise.types import FinishReason

NOISE = NoiseKey(0, 0, "s", 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer(folder)


def sampler(tokenizer, script, **options):
    return ScriptedSampler(tokenizer, script if callable(script) else lines(script), end_id=2, **options)


def ask(made, conversation="c/0", ids=(5, 6), **params):
    return asyncio.run(write(made, conversation, ids, SamplingParams(**{"max_tokens": 100, **params}), NOISE))


def test_it_says_one_line_a_turn_and_repeats_the_last(tokenizer):
    made = sampler(tokenizer, ["one", "two"])
    texts = [tokenizer.decode(ask(made).token_ids) for _ in range(3)]
    assert texts == ["one<|im_end|>", "two<|im_end|>", "two<|im_end|>"]


def test_conversations_are_counted_apart_and_segments_of_one_together(tokenizer):
    made = sampler(tokenizer, ["one", "two", "three"])
    said = [tokenizer.decode(ask(made, name).token_ids[:-1]) for name in ("a/0", "b/0", "a/0", "a/1", "c")]
    assert said == ["one", "one", "two", "three", "one"]
    asyncio.run(made.release("a/0"))
    asyncio.run(made.release("unknown/0"))
    assert tokenizer.decode(ask(made, "a/0").token_ids[:-1]) == "one"
    asyncio.run(made.close())
    assert tokenizer.decode(ask(made, "b/0").token_ids[:-1]) == "one"


def test_completions_are_certain_and_aligned(tokenizer):
    completion = ask(sampler(tokenizer, ["hello there"]))
    assert completion.token_ids == (*tokenizer.encode("hello there").ids, 2)
    assert completion.logprobs == (0.0,) * len(completion.token_ids)
    assert completion.finish_reason is FinishReason.STOP and completion.policy_version == 0


@pytest.mark.parametrize("spare", [-2, -1, 0, 1])
@pytest.mark.parametrize("limit", ["max_tokens", "context"])
def test_limits_cut_and_say_so(tokenizer, spare, limit):
    whole = [*tokenizer.encode("hello there").ids, 2]
    room = len(whole) + spare
    made = sampler(tokenizer, ["hello there"], context_length=2 + room if limit == "context" else 1 << 20)
    completion = ask(made, max_tokens=room if limit == "max_tokens" else 1000)
    assert list(completion.token_ids) == whole[:room]
    assert completion.finish_reason is (FinishReason.STOP if spare >= 0 else FinishReason.LENGTH)


def test_a_context_that_is_full_already_gives_nothing(tokenizer):
    completion = ask(sampler(tokenizer, ["x"], context_length=1))
    assert completion.token_ids == () and completion.finish_reason is FinishReason.LENGTH


def test_stop_strings_end_a_turn_and_stay_in_it(tokenizer):
    made = sampler(tokenizer, ["say </b> then </a> and more"])
    completion = ask(made, stop_strings=("</a>", "</b>"))
    assert tokenizer.decode(completion.token_ids) == "say </b>"
    assert completion.finish_reason is FinishReason.STOP


def test_a_script_sees_whose_turn_it_is_and_what_was_said(tokenizer):
    seen = []

    def script(request):
        seen.append((request.noise, request.turn, request.text))
        return "ok"

    made = sampler(tokenizer, script)
    ids = tokenizer.encode("What is 6?").ids
    ask(made, ids=ids)
    assert seen == [(NOISE, 0, "What is 6?")]


def test_latency_lets_others_run(tokenizer):
    made = sampler(tokenizer, ["x"], latency=0.001)
    order = []

    async def other():
        order.append("other")

    async def main():
        task = asyncio.ensure_future(other())
        await write(made, "c/0", [1], SamplingParams(max_tokens=5), NOISE)
        order.append("generated")
        await task

    asyncio.run(main())
    assert order == ["other", "generated"]


def test_nothing_to_say_is_a_config_error():
    with pytest.raises(EngineError, match="nothing to say"):
        lines([])
