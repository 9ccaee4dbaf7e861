"""Agents written against the openai package's responses: items, tools, streams, and going on from a response by name."""

import openai
import pytest
from sdk_clients import ADD, ask, async_openai, sync_openai

from turnwise.types import Role, StopReason

TOOL = {"type": "function", "strict": False, **ADD["function"]}


def results(response):
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in response.output
        if item.type == "function_call"
    ]


def one_by_one(response):
    """Each call with its result after it, as hand-written loops put them."""
    found = iter(results(response))
    for item in response.output:
        yield item
        if item.type == "function_call":
            yield next(found)


@pytest.mark.parametrize("how", ["items", "one by one", "by name"])
def test_an_async_agent_with_tools_is_recorded_as_one_sequence(rollouts, agent, call, how):
    seen = []

    async def run(base_url, sample):
        wanted = {"model": "any", "tools": [TOOL], "instructions": "Be brief."}
        async with async_openai(base_url) as client:
            items, previous = ask(), None
            while True:
                seen.append(await client.responses.create(input=items, previous_response_id=previous, **wanted))
                found = results(seen[-1])
                if not found:
                    return seen[-1].output_text
                if how == "by name":
                    items, previous = found, seen[-1].id
                elif how == "items":
                    items = [*items, *seen[-1].output, *found]
                else:
                    items = [*items, *one_by_one(seen[-1])]

    lines = [f"<think>add</think>So: {call('add', a=1, b=2)}{call('add', a=3, b=4)}", call("add", a=5, b=6), "It is 3."]
    rollout = rollouts.make(lines, client=agent(run))
    found = rollout.play()
    rollout.check_tokens(found)
    assert found.stop_reason is StopReason.ANSWERED and not found.branches and len(found.segments) == 1
    assert found.artifacts["client_result"] == "It is 3." and found.render_check.exact
    roles = ["system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [message.role for message in found.messages] == roles
    kinds = [[item.type for item in one.output] for one in seen]
    assert kinds == [["reasoning", "message", "function_call", "function_call"], ["function_call"], ["message"]]
    assert seen[0].output[0].content[0].text == "add" and seen[0].output[2].arguments == '{"a": 1, "b": 2}'
    assert all(one.status == "completed" for one in seen)
    usage = [(one.usage.input_tokens, one.usage.output_tokens) for one in seen]
    assert usage == [(turn.prompt_tokens, turn.completion_tokens) for turn in found.turns]


def test_a_sync_agent_streams_the_same_response(rollouts, agent, call):
    said, kinds, raw = [], [], []

    def run(base_url, sample):
        wanted = {"model": "m", "tools": [TOOL], "include": ["message.output_text.logprobs"]}
        with sync_openai(base_url) as client:
            said.append(client.responses.create(input="a", **wanted))
            with client.responses.stream(input="b", **wanted) as events:
                kinds.extend(event.type for event in events)
                said.append(events.get_final_response())
            raw.extend(client.responses.create(input="c", stream=True, **wanted))

    text = "A long text, ünï©ode 🎲 and all, in more than one piece. " * 3
    rollout = rollouts.make(["<think>hm</think>" + text + call("add", a=1, b=2)], client=agent(run))
    found = rollout.play()
    assert found.failure is None and len(found.branches) == 2
    plain, streamed = (
        [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in one.output] for one in said
    )
    assert (
        [one["type"] for one in plain] == [one["type"] for one in streamed] == ["reasoning", "message", "function_call"]
    )
    assert plain[0] == streamed[0] and plain[2]["arguments"] == streamed[2]["arguments"] == '{"a": 1, "b": 2}'
    assert said[0].output_text == said[1].output_text == text.strip()
    assert said[1].usage.output_tokens == said[0].usage.output_tokens == len(said[0].output[1].content[0].logprobs) > 0
    order = [kind for number, kind in enumerate(kinds) if kind != (kinds[number - 1] if number else None)]
    part = ["response.content_part.added", "response.{0}.delta", "response.{0}.done", "response.content_part.done"]
    added, done = "response.output_item.added", "response.output_item.done"
    calls = "response.function_call_arguments"
    assert order == [
        "response.created", "response.in_progress",
        added, *(one.format("reasoning_text") for one in part), done,
        added, *(one.format("output_text") for one in part), done,
        added, f"{calls}.delta", f"{calls}.done", done,
        "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    deltas = [event.delta for event in raw if event.type == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(deltas) == raw[-1].response.output_text


def test_one_goes_on_from_a_response_by_name_and_two_do_so_apart(rollouts, agent):
    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            create = client.responses.create
            first = await create(model="m", input="one")
            second = await create(model="m", input="two", previous_response_id=first.id)
            assert second.previous_response_id == first.id
            other = await create(model="m", input="three", previous_response_id=first.id, store=False)
            told = await create(model="m", input="four", previous_response_id=second.id, instructions="Be brief.")
            for name in (other.id, "resp_unknown"):
                with pytest.raises(openai.BadRequestError, match="previous_response_id") as caught:
                    await create(model="m", input="five", previous_response_id=name)
                assert caught.value.code == "previous_response_not_found"
            return told.output_text

    rollout = rollouts.make(lambda request: "as before", client=agent(run))
    found = rollout.play()
    assert found.failure is None and found.artifacts["client_result"] == "as before"
    assert [message.text for message in found.messages] == ["one", "as before", "two", "as before"]
    branches = [[message.text for message in branch.messages] for branch in found.branches]
    assert branches[0] == ["one", "as before", "three", "as before"]
    assert branches[1] == ["Be brief.", "one", "as before", "two", "as before", "four", "as before"]


def test_a_limit_makes_a_response_incomplete(rollouts, agent):
    seen = []

    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            seen.append(await client.responses.create(model="m", input="a", max_output_tokens=2))
            stream = await client.responses.create(model="m", input="b", max_output_tokens=2, stream=True)
            seen.extend([event async for event in stream][-1:])

    found = rollouts.make(["one two three"], client=agent(run)).play()
    assert found.failure is None and found.stop_reason is StopReason.ANSWERED
    assert seen[0].status == "incomplete" and seen[0].incomplete_details.reason == "max_output_tokens"
    assert seen[1].type == "response.incomplete" and seen[1].response.usage.output_tokens == 2


REFUSED = {
    "background": True,
    "conversation": "conv_1",
    "prompt": {"id": "pmpt_1"},
    "top_logprobs": 3,
    "tool_choice": "mystery",
    "text": {"format": {"type": "json_object"}},
    "include": ["file_search_call.results"],
}
NAMED = [
    ({"tools": [{"type": "web_search"}]}, "tools: 'web_search' is not served"),
    ({"tools": [{**TOOL, "parameters": {"type": 7}, "strict": True}]}, "tools"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "no item 'msg_1' is kept"),
    ({"input": [{"type": "function_call_output", "output": "3"}]}, "call_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, r"input\.0\.content\.0\.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "detail": "auto", "file_id": "f"}]}]}, "file_id"),
    ({"input": []}, "nothing to answer"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "add", "arguments": "{"}]}, "not JSON"),
]  # fmt: skip


def test_what_cannot_be_honoured_is_refused_by_name(rollouts, agent):
    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            for name, value in REFUSED.items():
                with pytest.raises(openai.BadRequestError, match=name):
                    await client.responses.create(model="m", input="a", **{name: value})
            for values, text in NAMED:
                with pytest.raises(openai.BadRequestError, match=text):
                    await client.responses.create(**{"model": "m", "input": "a", **values})
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve("resp_1")
            harmless = {"truncation": "disabled", "text": {"format": {"type": "text"}}, "background": False}
            include = ["reasoning.encrypted_content"]
            await client.responses.create(model="m", input="a", store=False, include=include, **harmless)

    found = rollouts.make(["ok"], client=agent(run)).play()
    assert found.failure is None and len(found.turns) == 1
    assert [message.role for message in found.messages] == [Role.USER, Role.ASSISTANT]
