"""A Sample back as the row it was read from, for files that are made of recorded samples."""

import copy
import json
from typing import Any

from turnwise.data.samples import PLAIN_PROMPT
from turnwise.types import Image, Message, Sample, Text, ToolCall


def to_values(sample: Sample, *, prompt_key: str = "prompt") -> dict[str, Any]:
    """The columns of a row that `to_sample` reads as this sample; only its id is another, made of file and place.

    Images stand in the messages.
    """
    info: dict[str, Any] = copy.deepcopy(sample.info)
    extra = info.pop("extra_info", {})
    reward_model = info.pop("reward_model", {})
    is_plain = info.pop(PLAIN_PROMPT, False) is True and len(sample.prompt) == 1
    if sample.ground_truth is not None:
        reward_model["ground_truth"] = sample.ground_truth
    values: dict[str, Any] = {
        "data_source": sample.data_source,
        prompt_key: sample.prompt[0].text if is_plain else [_message(message) for message in sample.prompt],
        **info,
        "reward_model": reward_model,
        "extra_info": extra,
        "agent_name": sample.agent,
    }
    if sample.tools_kwargs and "tools_kwargs" not in extra:
        values["tools_kwargs"] = copy.deepcopy(sample.tools_kwargs)
    if sample.interaction is not None and "interaction_kwargs" not in extra:
        values["interaction_kwargs"] = {"name": sample.interaction.name, **copy.deepcopy(sample.interaction.kwargs)}
    return {column: value for column, value in values.items() if value not in (None, {})}


def _message(message: Message) -> dict[str, Any]:
    content: Any = message.content
    if not isinstance(content, str):
        content = [_part(part) for part in content]
    entry = {"role": message.role.value, "content": content}
    names = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning}
    if message.tool_calls:
        entry["tool_calls"] = [_call(call) for call in message.tool_calls]
    return entry | {key: value for key, value in names.items() if value is not None}


def _call(call: ToolCall) -> dict[str, Any]:
    # As text: of a table's objects, each would have the members of all.
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def _part(part: Text | Image) -> dict[str, str]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return {"type": "image", "image": part.source}
