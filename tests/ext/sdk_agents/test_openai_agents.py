"""Agents written against the openai package: each call is a turn, token by token what the sampler saw and wrote."""

import asyncio

import openai
import pytest
from sdk_clients import ADD, ask, async_openai, sync_openai, told

from turnwise.ext.sdk_agents.server import client_server
from turnwise.types import CallStatus, Origin, Role, StopReason


def test_an_async_agent_with_tools_is_recorded_as_one_sequence(rollouts, agent, call):
    seen = []

    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            messages = [{"role": "developer", "content": "Be brief."}, *ask(sample.prompt[-1].text)]
            while True:
                answer = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
                seen.append(answer)
                message = answer.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return message.content
                messages += [{"role": "tool", "tool_call_id": one.id, "content": "3"} for one in message.tool_calls]

    rollout = rollouts.make([f"<think>add</think>So: {call('add', a=1, b=2)}", "It is 3."], client=agent(run))
    found = rollout.play()
    rollout.check_tokens(found)
    assert found.stop_reason is StopReason.ANSWERED and not found.branches and len(found.segments) == 1
    assert found.artifacts["client_result"] == "It is 3."
    assert [message.role for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.render_check.exact
    first, last = (one.choices[0] for one in seen)
    assert first.finish_reason == "tool_calls" and last.finish_reason == "stop"
    assert first.message.content == "So:" and first.message.reasoning_content == "add"
    assert first.message.tool_calls[0].function.arguments == '{"a": 1, "b": 2}'
    usage = [(one.usage.prompt_tokens, one.usage.completion_tokens) for one in seen]
    assert usage == [(turn.prompt_tokens, turn.completion_tokens) for turn in found.turns]
    prompt = rollouts.renderer.tokenizer.decode(found.segments[0].token_ids[: found.turns[0].start].tolist())
    assert "Be brief." in prompt and '"add"' in prompt and sum(found.segments[0].origins == Origin.TOOL) > 0


def test_a_sync_agent_streams_the_same_message(rollouts, agent, call):
    said, kinds = [], set()

    def run(base_url, sample):
        with sync_openai(base_url) as client:
            said.append(client.chat.completions.create(model="m", messages=ask("a"), tools=[ADD]))
            wanted = {"model": "m", "messages": ask("b"), "tools": [ADD], "stream_options": {"include_usage": True}}
            with client.chat.completions.stream(**wanted) as events:
                kinds.update(event.type for event in events)
                said.append(events.get_final_completion())

    text = "A long text, ünï©ode 🎲 and all, in more than one piece. " * 3
    rollout = rollouts.make([text + call("add", a=1, b=2) + call("add", a=3, b=4)], client=agent(run))
    found = rollout.play()
    assert found.failure is None and len(found.branches) == 1
    assert {"chunk", "content.delta", "tool_calls.function.arguments.delta"} <= kinds
    plain, streamed = (one.choices[0] for one in said)
    assert plain.message.content == streamed.message.content and plain.finish_reason == streamed.finish_reason
    arguments = [[one.function.arguments for one in choice.message.tool_calls] for choice in (plain, streamed)]
    assert arguments[0] == arguments[1] == ['{"a": 1, "b": 2}', '{"a": 3, "b": 4}']
    assert said[1].usage.completion_tokens == said[0].usage.completion_tokens > 0


def test_a_strict_tool_is_called_only_with_what_fits_its_schema(rollouts, agent, call):
    seen = []
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}

    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            messages = ask()
            for reply in ("Say it with numbers.", None):
                answer = (await client.chat.completions.create(model="m", messages=messages, tools=[strict])).choices[0]
                seen.append(answer)
                messages += [answer.message, {"role": "user", "content": reply}]

    wrong, right = call("add", a="one", b=2), call("add", a=1, b=2)
    found = rollouts.make([wrong, right], client=agent(run)).play()
    assert found.failure is None and not found.branches
    assert seen[0].message.tool_calls is None and seen[0].message.content == wrong and seen[0].finish_reason == "stop"
    assert seen[1].message.tool_calls[0].function.arguments == '{"a": 1, "b": 2}'
    assert [record.status for record in found.turns[0].calls] == [CallStatus.BAD_ARGUMENTS]


REFUSED = {
    "n": 2,
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_object"},
    "functions": [{"name": "add"}],
    "top_logprobs": 3,
    "max_tokens": 0,
}


def test_what_cannot_be_honoured_is_refused_in_openais_shape(rollouts, agent):
    errors = {}

    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            create = client.chat.completions.create
            for name, value in REFUSED.items():
                with pytest.raises(openai.BadRequestError) as caught:
                    await create(model="m", messages=ask(), extra_body={name: value})
                errors[name] = caught.value.body
            for url in ("data:image/png;base64,AAAA", "/etc/passwd"):
                content = [{"type": "image_url", "image_url": {"url": url}}]
                with pytest.raises(openai.BadRequestError, match="image"):
                    await create(model="m", messages=[{"role": "user", "content": content}])
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="m", input="x")
            assert [model.id async for model in await client.models.list()] == ["policy"]
            harmless = {"n": 1, "temperature": 1.0, "tool_choice": "auto", "logit_bias": {}, "metadata": {}}
            await create(model="m", messages=ask(), **harmless)

    found = rollouts.make(["ok"], client=agent(run)).play()
    assert found.failure is None and len(found.turns) == 1
    assert set(errors) == set(REFUSED)
    assert all(body["type"] == "invalid_request_error" and name in body["message"] for name, body in errors.items())


def test_a_limit_and_a_stop_of_the_clients_are_honoured(rollouts, agent):
    seen = []

    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            create = client.chat.completions.create
            seen.append(await create(model="m", messages=ask("a"), max_completion_tokens=2))
            seen.append(await create(model="m", messages=ask("b"), stop=["END"], logprobs=True))
            answer = told(seen[1].choices[0].message.content)
            seen.append(await create(model="m", messages=[*ask("b"), answer, *ask("c")]))

    found = rollouts.make(["one two three END four"], client=agent(run)).play()
    short, stopped, again = (one.choices[0] for one in seen)
    assert found.failure is None and found.stop_reason is StopReason.ANSWERED
    assert short.finish_reason == "length" and seen[0].usage.completion_tokens == 2
    assert stopped.finish_reason == "stop" and stopped.message.content.strip() == "one two three"
    assert again.message.content == "one two three END four"
    (branch,) = found.branches
    assert [turn.message.text for turn in branch.turns] == ["one two three END", "one two three END four"]
    tokens = stopped.logprobs.content
    assert "".join(one.token for one in tokens) == "one two three END"
    ledger, start = found.segments[branch.turns[0].segment], branch.turns[0].start
    assert [one.logprob for one in tokens] == pytest.approx(ledger.logprobs[start : start + len(tokens)].tolist())


def test_a_spent_budget_ends_the_episode_and_the_client_hears_of_it(rollouts, agent):
    errors = []

    async def run(base_url, sample):
        async with async_openai(base_url, retries=3) as client:
            messages = ask()
            while True:
                try:
                    answer = await client.chat.completions.create(model="m", messages=messages)
                except openai.BadRequestError as error:
                    errors.append(error.code)
                    raise
                messages += [told(answer.choices[0].message.content), *ask("more")]

    rollout = rollouts.make(["yes"], client=agent(run), max_assistant_turns=3)
    found = rollout.play()
    assert found.stop_reason is StopReason.ASSISTANT_TURN_BUDGET and found.failure is None
    assert errors == ["episode_ended"] and len(found.turns) == 3 and len(rollout.sampler.requests) == 3


def test_a_turn_that_our_limit_cuts_is_given_and_ends_the_episode(rollouts, agent):
    seen = []

    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            seen.append(await client.chat.completions.create(model="m", messages=ask()))
            await client.chat.completions.create(model="m", messages=ask("again"))

    found = rollouts.make(["a long answer to this"], client=agent(run), max_tokens=3).play()
    assert found.stop_reason is StopReason.TURN_TRUNCATED and found.failure is None
    assert seen[0].choices[0].finish_reason == "length" and len(found.turns) == 1


@pytest.mark.parametrize("kind", ["raises", "exits", "never calls", "returns an object"])
def test_a_mistake_of_the_agent_fails_its_episode_by_name(rollouts, agent, kind):
    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            if kind == "raises":
                raise KeyError("lost")
            if kind != "never calls":
                await client.chat.completions.create(model="m", messages=ask())
        if kind == "exits":
            raise SystemExit(3)
        return object() if kind == "returns an object" else None

    found = rollouts.make(["ok"], client=agent(run)).play()
    assert found.stop_reason is StopReason.FAILED and "client turnwise_test_agent:run" in found.failure
    assert ("KeyError: 'lost'" in found.failure) is (kind == "raises")


def test_time_that_is_up_reaches_the_agent_and_its_call(rollouts, agent):
    stopped = []

    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            await client.chat.completions.create(model="m", messages=ask())
            try:
                await client.chat.completions.create(model="m", messages=ask("again"))
            except asyncio.CancelledError:
                stopped.append(True)
                raise

    rollout = rollouts.make(lambda request: "ok", client=agent(run), max_seconds=1.0)
    generate = rollout.sampler.generate

    async def hanging(request):
        if len(rollout.sampler.requests) == 1:
            await asyncio.Event().wait()
        return await generate(request)

    rollout.sampler.generate = hanging
    found = rollout.play()
    assert found.stop_reason is StopReason.TIME_BUDGET and stopped == [True] and len(found.turns) == 1


def test_an_engine_that_fails_is_no_mistake_of_the_agents(rollouts, agent):
    async def run(base_url, sample):
        async with async_openai(base_url, retries=3) as client:
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="m", messages=ask())

    rollout = rollouts.make(["ok"], client=agent(run))
    rollout.sampler.error = RuntimeError("the engine broke")
    with pytest.raises(RuntimeError, match="the engine broke"):
        rollout.play()


def test_siblings_do_not_hear_each_other(rollouts, agent):
    urls = set()

    async def run(base_url, sample):
        urls.add(base_url)
        async with async_openai(base_url) as client:
            messages = ask("same for all")
            for _ in range(3):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [told(answer.choices[0].message.content), *ask("on")]

    rollout = rollouts.make(lambda request: f"I am {request.noise.sibling}", client=agent(run))
    group = asyncio.run(rollout.group(6))
    assert len(urls) == 6 and all(one.failure is None for one in group.trajectories)
    for one in group.trajectories:
        rollout.check_tokens(one)
        assert {message.text for message in one.answers} == {f"I am {one.sibling}"} and not one.branches
        assert [message.role for message in one.messages].count(Role.ASSISTANT) == 3


def test_a_session_is_gone_with_its_episode(rollouts, agent):
    kept = []

    async def run(base_url, sample):
        kept.append(base_url)
        async with async_openai(base_url) as client:
            await client.chat.completions.create(model="m", messages=ask())

    rollout = rollouts.make(["ok"], client=agent(run))

    async def play():
        async with client_server() as server:
            await rollout.episode()
            assert not server.sessions
            async with async_openai(kept[0]) as client:
                with pytest.raises(openai.NotFoundError) as caught:
                    await client.chat.completions.create(model="m", messages=ask())
        return caught.value.code

    assert asyncio.run(play()) == "episode_ended"
