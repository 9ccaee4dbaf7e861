"""Which sequence a call goes on: the longest recorded one that means the same, or a new one."""

import asyncio
import itertools
import json

import pytest
from sdk_clients import ADD, ask, async_openai, told

from turnwise.types import StopReason


def play(rollouts, agent, talk, script, **settings):
    async def run(base_url, sample):
        async with async_openai(base_url) as client:

            async def say(messages, **wanted):
                answer = await client.chat.completions.create(model="m", messages=messages, **wanted)
                return answer.choices[0].message

            await talk(say)

    rollout = rollouts.make(script, client=agent(run), **settings)
    found = rollout.play()
    assert found.failure is None, found.failure
    return found, rollout


SPELLINGS = {
    "as it came": lambda message: message.model_dump(),
    "null text": lambda message: {**message.model_dump(exclude_none=True), "content": None},
    "no text": lambda message: {key: value for key, value in message.model_dump().items() if key != "content"},
    "other JSON": lambda message: {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": one.id,
                "type": "function",
                "function": {
                    "name": one.function.name,
                    "arguments": json.dumps(dict(reversed(json.loads(one.function.arguments).items())), indent=1),
                },
            }
            for one in message.tool_calls
        ],
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_echo_is_found_however_it_is_spelled(rollouts, agent, call, spelling):
    async def talk(say):
        message = await say(ask(), tools=[ADD])
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "3"}]}
        await say([*ask(), SPELLINGS[spelling](message), result], tools=[ADD])

    found, rollout = play(rollouts, agent, talk, ["<think>hm</think>\n" + call("add", a=1, b=2), "3"])
    rollout.check_tokens(found)
    assert not found.branches and len(found.turns) == 2 and len(found.segments) == 1


async def rewritten(say):
    await say([*ask(), told("no, I said this"), *ask("on")])


async def other_tools(say):
    await say([*ask(), told("one"), *ask("on")], tools=[ADD])


async def nothing_new(say):
    await say([*ask(), told("one")])


async def other_start(say):
    await say([{"role": "system", "content": "x"}, *ask(), told("one"), *ask("on")])


@pytest.mark.parametrize("second", [rewritten, other_tools, nothing_new, other_start])
def test_anything_else_is_a_sequence_of_its_own(rollouts, agent, second):
    async def talk(say):
        await say(ask())
        await second(say)

    found, rollout = play(rollouts, agent, talk, ["one", "two"])
    assert len(found.branches) == 1 and len(found.segments) == 2
    for turn, request in zip([*found.turns, *found.branches[0].turns], rollout.sampler.requests, strict=True):
        ledger = found.segments[turn.segment]
        assert ledger.token_ids.tolist() == [*request.token_ids, *request.completion.token_ids.tolist()]
        assert sum(ledger.loss_mask) == turn.completion_tokens
    recorded = found.branches[0].messages
    # What the policy said is put to it as it said it; what the client made up, as the client has it.
    assert any(message is found.turns[0].message for message in recorded) is (second is not rewritten)


def test_of_two_calls_at_once_one_extends_and_the_other_forks(rollouts, agent):
    async def talk(say):
        await say(ask())
        on = [*ask(), told("one"), *ask("on")]
        await asyncio.gather(say(on), say(on))

    found, _ = play(rollouts, agent, talk, lambda request: "one" if request.text.count("user") < 2 else "two")
    assert len(found.turns) == 2 and [len(branch.turns) for branch in found.branches] == [1]


def test_what_is_drawn_does_not_depend_on_which_call_comes_first(rollouts, agent):
    def answers(order):
        said = {}

        async def talk(say):
            async def turn(name, messages):
                said[name] = (await say(messages)).content
                return [*messages, told(said[name])]

            begun = {name: await turn(name, ask(name)) for name in order}
            for name in order:  # both go on the same sequence: one extends it, the other forks
                await turn(f"a{name}", [*begun["a"], *ask(f"and {name}")])
            for number in range(2):  # the same once more draws another
                await turn(f"again {number}", ask("a"))

        found, _ = play(rollouts, agent, talk, lambda request: f"{request.noise.bits():x}")
        assert len(found.branches) == 4
        return said

    forth, back = answers("ab"), answers("ba")
    assert forth == back and len(set(forth.values())) == len(forth) == 6


def test_copies_of_tools_and_prompts_cost_no_new_look_at_the_template(rollouts, agent, call):
    async def talk(say):
        message = await say(ask(), tools=[ADD])
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        await say([*ask(), message, result], tools=[ADD])

    frames, counts = rollouts.renderer.frames, []
    for _ in range(3):
        play(rollouts, agent, talk, [call("add", a=1, b=2), "3"])
        counts.append((frames.filled, sum(frames.rendered.values())))
    assert [after[1] - before[1] for before, after in itertools.pairwise(counts)] == [0, 0]
    assert [after[0] - before[0] for before, after in itertools.pairwise(counts)] == [1, 1]


def test_the_longest_of_several_is_extended(rollouts, agent):
    async def talk(say):
        await say(ask())
        await say([*ask(), told("yes"), *ask("b")])
        await say([*ask(), told("yes"), *ask("b"), told("yes"), *ask("c")])
        await say([*ask(), told("yes"), *ask("other")])
        await say([*ask(), told("yes"), *ask("other"), told("yes"), *ask("c")])

    found, _ = play(rollouts, agent, talk, ["yes"])
    assert len(found.turns) == 3 and [len(branch.turns) for branch in found.branches] == [2]


def test_a_call_that_is_broken_off_is_taken_up_again(rollouts, agent):
    broken = []

    async def talk(say):
        await say(ask())
        on = [*ask(), told("yes"), *ask("on")]
        with pytest.raises(Exception, match="timed out"):
            await say(on, timeout=0.5)
        broken.append(len(rollout.sampler.requests))
        await say(on)

    async def run(base_url, sample):
        async with async_openai(base_url) as client:

            async def say(messages, **wanted):
                return await client.chat.completions.create(model="m", messages=messages, **wanted)

            await talk(say)

    rollout = rollouts.make(["yes"], client=agent(run))
    generate, hung = rollout.sampler.generate, []

    async def hanging(request):
        if len(rollout.sampler.requests) == 1 and not hung:
            hung.append(True)
            await asyncio.Event().wait()
        return await generate(request)

    rollout.sampler.generate = hanging
    found = rollout.play()
    assert found.failure is None and found.stop_reason is StopReason.ANSWERED and broken == [1]
    assert len(found.turns) == 2 and not found.branches
    rollout.check_tokens(found)


def test_a_branch_that_never_spoke_is_not_recorded(rollouts, agent):
    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            create = client.chat.completions.create
            await create(model="m", messages=ask())
            with pytest.raises(Exception, match="timed out"):
                await create(model="m", messages=ask("another"), timeout=0.5)

    rollout = rollouts.make(["yes"], client=agent(run))
    generate = rollout.sampler.generate

    async def hanging(request):
        if rollout.sampler.requests:
            await asyncio.Event().wait()
        return await generate(request)

    rollout.sampler.generate = hanging
    found = rollout.play()
    assert found.failure is None and found.stop_reason is StopReason.ANSWERED
    assert len(found.turns) == 1 and not found.branches and len(found.segments) == 1
