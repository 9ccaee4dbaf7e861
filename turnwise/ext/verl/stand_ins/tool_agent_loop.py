"""Stand-ins for verl's two own agent loops, to derive from: the same states and steps, on our tools and users.

Where verl's tool agent loop and ours differ (docs/ext/verl.md), it is ours: the calls of the last permitted
turn are run, and unreadable ones are answered. What a budget of ours ends is returned as far as it went.
"""

import asyncio
import json
from enum import Enum
from typing import Any
from uuid import uuid4

from turnwise.ext.verl.stand_ins.agent_loop import AgentLoopBase, AgentLoopOutput, register
from turnwise.ext.verl.stand_ins.tool_parser import FunctionCall, ToolParser
from turnwise.ext.verl.stand_ins.tools import ToolResponse
from turnwise.ext.verl.stand_ins.verl_utils import simple_timer
from turnwise.rollout.conversation import EpisodeEnd


class AgentState(Enum):
    """What the agent loop does next."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"
    INTERACTING = "interacting"


class AgentData:
    """An episode as the steps see it."""

    def __init__(self, messages: list[dict[str, Any]], image_data: Any = None, **given: Any) -> None:
        self.messages = messages
        self.image_data = image_data
        self.metrics: dict[str, Any] = {}
        self.request_id = uuid4().hex
        self.tools_kwargs: dict[str, Any] = {}
        self.prompt_ids: list[int] = []
        """All ids so far, whoever wrote them."""
        self.response_ids: list[int] = []
        """Those of the last turn."""
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.user_turns = 0
        self.assistant_turns = 0
        self.tool_calls: list[FunctionCall] = []
        self.extra_fields: dict[str, Any] = {}
        vars(self).update(given)


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """An agent loop of one answer, without tools."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        metrics: dict[str, float] = {}
        ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        with simple_timer("generate_sequences", metrics):
            written = await self.server_manager.generate(uuid4().hex, prompt_ids=ids, sampling_params=sampling_params)
        return AgentLoopOutput.model_validate({
            "prompt_ids": ids, "response_ids": written.token_ids, "response_mask": [1] * len(written.token_ids),
            "response_logprobs": written.log_probs, "num_turns": 2, "metrics": metrics,
            "extra_fields": {"turn_scores": [], "tool_rewards": []},
        })  # fmt: skip


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Answer, call tools, read their results, be asked again; each step is a method that a subclass may replace."""

    def __init__(self, *args: Any, tools: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        turns = self.rollout_config.multi_turn
        self.max_user_turns, self.max_assistant_turns = turns.max_user_turns, turns.max_assistant_turns
        self.max_parallel_calls = turns.max_parallel_calls
        self.prompt_length, self.response_length = (
            self.rollout_config.prompt_length,
            self.rollout_config.response_length,
        )
        self.tools = {tool.name: tool for tool in (tools.tools if tools else [])}
        self.tool_schemas = [tool.tool_schema.model_dump() for tool in self.tools.values()]
        self.tool_parser_name = turns.format
        self.tool_parser = ToolParser.get_tool_parser(turns.format, self.tokenizer)
        self.interaction_config_file, self.interaction_map = None, dict[str, Any]()  # the run itself asks the user

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        data = AgentData(list(kwargs["raw_prompt"]), tools_kwargs=kwargs.get("tools_kwargs") or {})
        state = AgentState.PENDING
        try:
            while state is not AgentState.TERMINATED:
                state = await self._step(state, data, sampling_params)
        except EpisodeEnd:  # a budget, or the user: the trajectory says which
            pass
        length = len(data.response_mask)
        start = len(data.prompt_ids) - length
        return AgentLoopOutput.model_validate({
            "prompt_ids": data.prompt_ids[:start], "response_ids": data.prompt_ids[start:],
            "response_mask": data.response_mask, "response_logprobs": data.response_logprobs or None,
            "num_turns": data.user_turns + data.assistant_turns + 1, "metrics": data.metrics,
            "extra_fields": {**data.extra_fields, "turn_scores": data.turn_scores, "tool_rewards": data.tool_rewards},
        })  # fmt: skip

    async def _step(self, state: AgentState, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        match state:
            case AgentState.PENDING:
                return await self._handle_pending_state(data, sampling_params)
            case AgentState.GENERATING:
                return await self._handle_generating_state(data, sampling_params)
            case AgentState.PROCESSING_TOOLS:
                return await self._handle_processing_tools_state(data)
            case AgentState.INTERACTING:
                return await self._handle_interacting_state(data)
            case _:
                raise ValueError(f"the agent loop came to {state!r}, which is not a state")

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        agent_data.prompt_ids = await self.ct_build_initial_tokens(agent_data.messages, tools=self.tool_schemas)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        with simple_timer("generate_sequences", agent_data.metrics):
            written = await self.server_manager.generate(
                agent_data.request_id, prompt_ids=agent_data.prompt_ids, sampling_params=sampling_params
            )
        agent_data.assistant_turns += 1
        agent_data.response_ids = written.token_ids
        merged, agent_data.response_mask, logprobs = await self.ct_merge_assistant_token(
            agent_data.prompt_ids, written.token_ids, agent_data.response_mask, agent_data.response_logprobs,
            assistant_logprobs=written.log_probs,
        )  # fmt: skip
        agent_data.prompt_ids, agent_data.response_logprobs = merged.token_ids, logprobs or []
        schemas = [tool.tool_schema for tool in self.tools.values()]
        content, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(written.token_ids, schemas)
        agent_data.messages.append(self._build_assistant_message(content, agent_data))
        if agent_data.tool_calls or self.server_manager.unreadable_calls():
            return AgentState.PROCESSING_TOOLS
        return AgentState.INTERACTING

    def _build_assistant_message(self, content: str, agent_data: AgentData) -> dict[str, Any]:
        """What was written: templates that would render it anew must come to the same words."""
        ids = agent_data.response_ids
        ended = ids[-1:] == [self.tokenizer.eos_token_id]
        return {"role": "assistant", "content": self.tokenizer.decode(ids[:-1] if ended else ids)}

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        with simple_timer("tool_calls", agent_data.metrics):
            answers = await asyncio.gather(
                *(self._call_tool(call, agent_data.tools_kwargs, agent_data) for call in calls)
            )
        texts = [response.text or "" for response, _, _ in answers]
        agent_data.tool_rewards += [reward for _, reward, _ in answers if reward is not None]
        texts += await self.server_manager.answer_unreadable_calls()
        return await self._told(agent_data, [{"role": "tool", "content": text} for text in texts])

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, Any], agent_data: AgentData
    ) -> tuple[Any, float | None, dict[str, Any]]:
        """(response, reward, metrics); what a tool raises, ours turns into a response."""
        if tool_call.name not in self.tools:
            text = f"Error: unknown tool {tool_call.name!r}: there are {', '.join(self.tools) or 'none'}"
            return ToolResponse(text=text), None, {}
        tool = self.tools[tool_call.name]
        instance_id, _ = await tool.create(create_kwargs=tools_kwargs.get(tool_call.name, {}).get("create_kwargs", {}))
        try:
            result: tuple[Any, float | None, dict[str, Any]] = await tool.execute(
                instance_id, json.loads(tool_call.arguments), agent_data=agent_data
            )
            return result
        finally:
            await tool.release(instance_id)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        try:
            reply = await self.server_manager.ask_user()
        finally:  # a user who ends the episode has scored as well
            agent_data.turn_scores = self.server_manager.user_scores()
        if reply is None:
            return AgentState.TERMINATED
        return await self._told(agent_data, [{"role": "user", "content": reply}])

    async def _told(self, data: AgentData, replies: list[dict[str, Any]]) -> AgentState:
        """Put replies behind what there is."""
        before = list(data.messages)
        data.messages += replies
        merged, data.response_mask, logprobs = await self.ct_merge_context_msg(
            before, data.messages, data.prompt_ids, data.response_mask, data.response_logprobs, tools=self.tool_schemas
        )
        data.prompt_ids, data.response_logprobs = merged.token_ids, logprobs or []
        data.user_turns += 1
        return AgentState.GENERATING
