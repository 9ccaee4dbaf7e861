"""A LangGraph agent through langchain-openai: what it sends back, spelled otherwise, is found again."""

import pytest
from langchain_core.messages import SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from turnwise.types import StopReason


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def graph(base_url: str, **options: bool) -> StateGraph:
    model = ChatOpenAI(base_url=base_url, api_key="none", model="any", max_retries=0, **options)
    model = model.bind_tools([add])

    async def speak(state: MessagesState):
        return {"messages": [await model.ainvoke([SystemMessage("Be brief."), *state["messages"]])]}

    flow = StateGraph(MessagesState)
    flow.add_node("speak", speak)
    flow.add_node("tools", ToolNode([add]))
    flow.add_edge(START, "speak")
    flow.add_conditional_edges("speak", tools_condition, {"tools": "tools", END: END})
    flow.add_edge("tools", "speak")
    return flow.compile()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_responses_api": True}, {"use_previous_response_id": True}])
def test_a_react_agent_is_one_sequence(rollouts, agent, call, monkeypatch, streaming, options):
    monkeypatch.setenv("LANGSMITH_TRACING", "false")

    async def run(base_url, sample):
        state = await graph(base_url, streaming=streaming, **options).ainvoke(
            {"messages": [("user", "1+2, then 3+4?")]}
        )
        return state["messages"][-1].text

    lines = ["<think>first</think>" + call("add", a=1, b=2), "Then: " + call("add", a=3, b=4), "3 and 7"]
    rollout = rollouts.make(lines, client=agent(run))
    found = rollout.play()
    rollout.check_tokens(found)
    assert found.stop_reason is StopReason.ANSWERED and not found.branches and len(found.turns) == 3
    assert found.artifacts["client_result"] == "3 and 7" and found.render_check.exact
    assert [message.text for message in found.messages if message.role == "tool"] == ["3", "7"]
