"""What real SDKs send beside the conversation: read, or left alone where the tokens stay the policy's, and then said."""

import httpx
import pytest
from sdk_clients import ADD, ask, async_anthropic, async_openai

from turnwise.data.task_config import compose
from turnwise.reports.alerts import Alerts
from turnwise.reports.evaluation import ignored_requests
from turnwise.reports.preflight import preflight
from turnwise.types import StopReason

CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
PLAIN = {CHAT: {"messages": ask()}, RESPONSES: {"input": "1+2?"}, MESSAGES: {"messages": ask(), "max_tokens": 99}}
QUIET = {
    CHAT: {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_key": "k"},
    RESPONSES: {"user": "u", "service_tier": "flex", "prompt_cache_key": "k", "safety_identifier": "s"},
    MESSAGES: {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
}
SAID = {
    CHAT: {"temperature": 0.1, "top_p": 0.5, "seed": 4, "tool_choice": "required", "reasoning_effort": "low",
           "frequency_penalty": 0.5, "parallel_tool_calls": False},
    RESPONSES: {"temperature": 0.1, "tool_choice": {"type": "function", "name": "add"}, "reasoning": {"effort": "low"},
                "truncation": "auto", "text": {"verbosity": "low"}},
    MESSAGES: {"temperature": 0.1, "top_k": 7, "context_management": {"edits": [{"type": "clear_tool_uses"}]},
               "output_config": {"effort": "high"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
               "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
}  # fmt: skip
WORDS = {
    CHAT: "temperature=0.1 (sampling.temperature=1 is used) top_p=0.5 seed tool_choice=required reasoning_effort "
    "frequency_penalty parallel_tool_calls=False",
    RESPONSES: "temperature=0.1 tool_choice= reasoning truncation verbosity",
    MESSAGES: "temperature=0.1 top_k=7 context_management effort budget_tokens tool_choice=any "
    "disable_parallel_tool_use=True",
}


def posting(path, body):
    async def run(base_url, sample):
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = await client.post(f"{base_url}/{path}", json={"model": "m", **PLAIN[path], **body})
            assert answer.status_code == 200, answer.text

    return run


@pytest.mark.parametrize("path", SAID)
def test_what_is_left_alone_changes_no_token_and_is_said_once(rollouts, agent, path, tmp_path):
    plain = rollouts.make(["It is 3."], client=agent(posting(path, QUIET[path]))).play()
    assert plain.failure is None and ignored_requests([plain]) is None
    found = rollouts.make(["It is 3."], client=agent(posting(path, SAID[path]))).play()
    assert found.failure is None and found.segments[0].token_ids.tolist() == plain.segments[0].token_ids.tolist()
    said = ignored_requests([found, found])
    assert all(word in said for word in WORDS[path].split()), said
    alerts = Alerts(compose(["eval.samples=2"]).config, tmp_path)
    assert said in alerts.after_step({}, [found])[0] and alerts.after_step({}, [found]) == []


def test_what_litellm_hangs_on_a_message_does_not_open_a_branch(rollouts, agent, call):
    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            messages = ask()
            for _ in range(2):
                answer = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
                made = answer.choices[0].message.model_dump(exclude_none=True)
                extra = {"provider_specific_fields": {"refusal": "no"}, "thinking_blocks": [{"a": 1}], "images": []}
                calls = [{**one, "provider_specific_fields": {"a": "b"}} for one in made.get("tool_calls", ())]
                messages += [{**made, **extra, **({"tool_calls": calls} if calls else {})}]
                messages += [{"role": "tool", "tool_call_id": one["id"], "content": "3"} for one in calls]

    rollout = rollouts.make([call("add", a=1, b=2), "3"], client=agent(run))
    found = rollout.play()
    rollout.check_tokens(found)
    assert found.failure is None and not found.branches and len(found.turns) == 2


@pytest.mark.parametrize("message", [{"role": "assistant", "content": "", "function_call": {"name": "add"}},
                                     {"role": "user", "content": "a", "audio": {"id": "b"}}])  # fmt: skip
def test_words_that_nobody_would_read_are_refused(rollouts, agent, message):
    async def run(base_url, sample):
        async with httpx.AsyncClient(trust_env=False) as client:
            asked = {"model": "m", "messages": [*ask(), message, *ask("again")]}
            answer = await client.post(f"{base_url}/chat/completions", json=asked)
            assert answer.status_code == 400 and ("function_call" in answer.text or "audio" in answer.text)
            await client.post(f"{base_url}/chat/completions", json={"model": "m", "messages": ask()})

    assert rollouts.make(["3"], client=agent(run)).play().failure is None


def test_a_client_that_wants_no_call_is_shown_its_text(rollouts, agent, call):
    seen = []

    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            wanted = {"model": "m", "messages": ask(), "tools": [ADD], "tool_choice": "none"}
            seen.append((await client.chat.completions.create(**wanted)).choices[0])
        async with async_anthropic(base_url) as client:
            tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
            wanted = {"model": "m", "max_tokens": 99, "messages": ask("b"), "tools": [tool]}
            seen.append(await client.messages.create(**wanted, tool_choice={"type": "none"}))

    written = call("add", a=1, b=2)
    assert rollouts.make([written], client=agent(run)).play().failure is None
    assert seen[0].message.tool_calls is None and seen[0].message.content == written
    assert seen[1].stop_reason == "end_turn" and seen[1].content[0].text == written


def test_items_of_earlier_responses_are_found_by_their_names(rollouts, agent, call):
    tool = {"type": "function", "name": "add", "parameters": ADD["function"]["parameters"], "strict": False}

    async def run(base_url, sample):
        async with async_openai(base_url) as client:
            first = await client.responses.create(model="m", input=ask(), tools=[tool])
            items = [{"type": "item_reference", "id": item.id} for item in first.output]
            made = next(item for item in first.output if item.type == "function_call")
            result = {"type": "function_call_output", "call_id": made.call_id, "output": "3"}
            await client.responses.create(model="m", input=[*ask(), *items, result], tools=[tool])

    rollout = rollouts.make([f"<think>add</think>So: {call('add', a=1, b=2)}", "It is 3."], client=agent(run))
    found = rollout.play()
    rollout.check_tokens(found)
    assert found.failure is None and not found.branches and len(found.turns) == 2


PARSING = """
import json
from openai import AsyncOpenAI
async def agent(base_url, sample):
    async with AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0) as client:
        asked = {"model": "m", "messages": [{"role": "user", "content": "6*7?"}], "temperature": 0.1}
        answer = (await client.chat.completions.create(**asked)).choices[0].message.content
    return json.loads(answer)["answer"]
"""


def test_an_agent_that_parses_answers_is_a_doubt_of_the_check_and_no_error(tmp_path):
    (tmp_path / "parsing.py").write_text(PARSING)
    chosen = ["eval.samples=2", "rollout.tools=[]", f"sdk_agents.client={tmp_path}/parsing.py:agent"]
    report = preflight(compose(chosen))
    assert report.passed, [finding.text for finding in report.errors]
    warnings = [one.text for one in report.findings if one.check.startswith("scripted rollout")]
    assert any("raised on the scripted answer '#### 0' (rollout.scripted_answer): JSON" in one for one in warnings)
    assert any("temperature=0.1 (sampling.temperature=" in one for one in warnings)
    report = preflight(compose([*chosen, """rollout.scripted_answer='{"answer": 0}'"""]))
    played = [one.text for one in report.findings if one.check.startswith("scripted rollout")]
    assert report.passed and f"1 turns, {StopReason.ANSWERED}" in played and not any("raised" in one for one in played)
