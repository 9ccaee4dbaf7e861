"""A small agent written against the OpenAI SDK: it knows nothing of Turnwise but the address that it is given."""

import json

from openai import AsyncOpenAI, BadRequestError

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(arguments: str) -> str:
    expression = json.loads(arguments).get("expression", "")
    if not set(str(expression)) <= set("0123456789.+-*/() ") or "**" in expression or len(expression) > 100:
        return "error: only numbers and + - * / ( )"
    try:
        return f"{eval(expression):g}"
    except (SyntaxError, ArithmeticError, TypeError) as error:
        return f"error: {error}"


async def agent(base_url: str, sample) -> str | None:
    """Answer one question; what it returns is kept with the trajectory."""
    messages = [{"role": message.role.value, "content": message.text} for message in sample.prompt]
    async with AsyncOpenAI(base_url=base_url, api_key="unused") as client:
        for _ in range(6):
            try:
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATE])
            except BadRequestError as error:
                if error.code == "episode_ended":  # a budget of the run's is used up
                    return None
                raise
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None
