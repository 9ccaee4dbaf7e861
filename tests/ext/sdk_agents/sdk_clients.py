"""Real SDK clients without keys, retries or a network, and the tool that the tests offer."""

import anthropic
import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def async_openai(base_url: str, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=retries)


def sync_openai(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def async_anthropic(base_url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0)


def sync_anthropic(base_url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)


def ask(question: str = "1+2?") -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def told(text: str | None) -> dict[str, str | None]:
    return {"role": "assistant", "content": text}
