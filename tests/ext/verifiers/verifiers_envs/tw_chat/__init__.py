"""A harness in this process: it talks until the model calls no tool, as verifiers' own null harness does in another."""

import json

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import mcp_client


class ChatConfig(vf.HarnessConfig):
    """Nothing of its own."""


class ChatHarness(vf.Harness[ChatConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            if not mcp_urls:
                await client.chat.completions.create(model=ctx.model, messages=messages)
                return vf.ProgramResult(0, "", "")
            (url,) = mcp_urls.values()
            async with mcp_client({"url": url}) as server:
                await self.with_tools(client, server, ctx.model, messages)
        return vf.ProgramResult(0, "", "")

    async def with_tools(self, client, server, model, messages):
        tools = [
            {"type": "function", "function": {"name": one.name, "description": one.description or "",
                                              "parameters": one.input_schema}}
            for one in (await server.list_tools()).tools
        ]  # fmt: skip
        while True:
            answer = (await client.chat.completions.create(model=model, messages=messages, tools=tools)).choices[0]
            messages.append(answer.message.model_dump(exclude_none=True))
            if not answer.message.tool_calls:
                return
            for call in answer.message.tool_calls:
                result = await server.call_tool(call.function.name, json.loads(call.function.arguments))
                text = "".join(part.text for part in result.content)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


__all__ = ["ChatHarness"]
