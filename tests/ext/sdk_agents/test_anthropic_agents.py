"""Agents written against the anthropic package: blocks, tools, streams and errors in its shapes."""

import anthropic
import pytest
from sdk_clients import ADD, ask, async_anthropic, sync_anthropic

from turnwise.ext.sdk_agents import anthropic_messages
from turnwise.types import Image, Role, StopReason, Text

TOOL = {"name": "add", "description": "Add two numbers.", "input_schema": ADD["function"]["parameters"]}
WANTED = {"model": "any", "max_tokens": 500}


def test_an_async_agent_with_tools_is_recorded_as_one_sequence(rollouts, agent, call):
    seen = []

    async def run(base_url, sample):
        async with async_anthropic(base_url) as client:
            messages = ask()
            while True:
                answer = await client.messages.create(messages=messages, tools=[TOOL], system="Be brief.", **WANTED)
                seen.append(answer)
                messages.append({"role": "assistant", "content": answer.content})
                calls = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    return answer.content[0].text
                results = [
                    {"type": "tool_result", "tool_use_id": one.id, "content": str(one.input["a"] + one.input["b"])}
                    for one in calls
                ]
                messages.append({"role": "user", "content": [*results, {"type": "text", "text": "and now?"}]})

    rollout = rollouts.make(
        ["<think>hm</think>So:" + call("add", a=1, b=2) + call("add", a=3, b=4), "3"], client=agent(run)
    )
    found = rollout.play()
    rollout.check_tokens(found)
    assert found.stop_reason is StopReason.ANSWERED and not found.branches
    roles = [message.role for message in found.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user", "assistant"]
    assert [one.stop_reason for one in seen] == ["tool_use", "end_turn"]
    assert [block.type for block in seen[0].content] == ["text", "tool_use", "tool_use"]
    usage = [(one.usage.input_tokens, one.usage.output_tokens) for one in seen]
    assert usage == [(turn.prompt_tokens, turn.completion_tokens) for turn in found.turns]


def test_a_sync_agent_streams_the_same_message(rollouts, agent, call):
    said = []

    def run(base_url, sample):
        with sync_anthropic(base_url.removesuffix("/v1")) as client:
            adaptive = {"thinking": {"type": "adaptive"}}
            said.append(client.messages.create(messages=ask("a"), tools=[TOOL], **adaptive, **WANTED))
            with client.messages.stream(messages=ask("b"), tools=[TOOL], **adaptive, **WANTED) as stream:
                text = "".join(stream.text_stream)
                said.append(stream.get_final_message())
            assert text == said[0].content[1].text

    line = "<think>so it is</think>" + "ünï©ode 🎲, in more than one piece. " * 3 + call("add", a=1, b=2)
    found = rollouts.make([line], client=agent(run)).play()
    assert found.failure is None
    plain, streamed = ([block.model_dump() for block in one.content] for one in said)
    assert plain[:2] == streamed[:2] and plain[2]["input"] == streamed[2]["input"] == {"a": 1, "b": 2}
    assert [block["type"] for block in plain] == ["thinking", "text", "tool_use"]
    assert said[1].stop_reason == "tool_use" and said[1].usage.output_tokens == said[0].usage.output_tokens > 0


REFUSED = {
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "tool_choice": {"type": "mystery"},
    "mcp_servers": [{"type": "url"}],
    "container": "c",
}


def test_what_cannot_be_honoured_is_refused_in_anthropics_shape(rollouts, agent):
    errors = {}

    async def run(base_url, sample):
        async with async_anthropic(base_url) as client:
            for name, value in REFUSED.items():
                body = {"messages": ask(), **WANTED, name: value}
                with pytest.raises(anthropic.BadRequestError) as caught:  # the SDK itself has no word for some of them
                    await client.post("/v1/messages", body=body, cast_to=object)
                errors[name] = caught.value.body
            stopped = await client.messages.create(messages=ask(), stop_sequences=["three"], **WANTED)
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
            assert stopped.content[0].text == "one two "

    found = rollouts.make(["one two three four"], client=agent(run)).play()
    assert found.failure is None and set(errors) == set(REFUSED)
    for name, body in errors.items():
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert name in body["error"]["message"]


def test_results_with_errors_and_images_are_read():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    failed = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "no"}], "is_error": True}
    user = {"role": "user", "content": [failed, {"type": "text", "text": "see"}, image]}
    call, _ = anthropic_messages.read({"messages": [user], **WANTED})
    assert [message.role for message in call.messages] == [Role.TOOL, Role.USER]
    assert call.messages[0].text == "Error: no" and call.messages[0].tool_call_id == "t"
    assert call.messages[1].content == (Text("see"), Image("data:image/png;base64,AAAA"))


def test_thoughts_results_in_lists_and_a_system_of_blocks_come_back_to_the_same_sequence(rollouts, agent, call):
    counts = []

    async def run(base_url, sample):
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        wanted = {"system": system, "tools": [TOOL], "thinking": {"type": "adaptive"}}
        async with async_anthropic(base_url) as client:
            messages = ask()
            while True:
                counts.append(
                    (await client.messages.count_tokens(model="any", messages=messages, **wanted)).input_tokens
                )
                answer = await client.messages.create(messages=messages, **wanted, **WANTED)
                messages.append({"role": "assistant", "content": answer.content})
                calls = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    return answer.content[-1].text
                assert answer.content[0].type == "thinking"
                content = [{"type": "text", "text": "3"}, {"type": "text", "text": "!"}]
                results = [{"type": "tool_result", "tool_use_id": one.id, "content": content} for one in calls]
                messages.append({"role": "user", "content": results})

    rollout = rollouts.make(["<think>hm</think>So: " + call("add", a=1, b=2), "It is 3."], client=agent(run))
    found = rollout.play()
    assert found.failure is None, found.failure
    rollout.check_tokens(found)
    assert not found.branches and found.artifacts["client_result"] == "It is 3."
    assert [message.text for message in found.messages if message.role in ("system", "tool")] == ["Be brief.", "3!"]
    assert counts == [turn.prompt_tokens for turn in found.turns]


def test_what_is_not_there_and_what_breaks_have_anthropics_shapes(rollouts, agent):
    errors = []

    async def run(base_url, sample):
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key="none", max_retries=3) as client:
            gone = anthropic.AsyncAnthropic(base_url=base_url[:-12] + "/v1", api_key="none", http_client=client._client)
            for work in (
                client.messages.batches.list(),
                gone.messages.create(messages=ask(), **WANTED),
                client.messages.create(messages=ask(), **WANTED),
            ):
                with pytest.raises(anthropic.APIStatusError) as caught:
                    await work
                errors.append((caught.value.status_code, caught.value.body["type"], caught.value.body["error"]["type"]))

    rollout = rollouts.make(["ok"], client=agent(run))
    rollout.sampler.error = RuntimeError("the engine broke")
    with pytest.raises(RuntimeError, match="the engine broke"):
        rollout.play()
    missing = (404, "error", "not_found_error")
    assert errors == [missing, missing, (500, "error", "api_error")]
