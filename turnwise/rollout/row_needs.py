"""What rows ask for and a run would not give: refused where the episode would be another one, told where it may be."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.data.prompts import MARKER
from turnwise.errors import DataError, PluginError
from turnwise.plugins import LONGEST_NAME
from turnwise.rollout.image_tools import ImageTool
from turnwise.rollout.tools.look import Look
from turnwise.rollout.tools.tool import Tool
from turnwise.rollout.workspaces import KEY, WorkspaceTool
from turnwise.types import Sample

TOOLS = "tools"
"""The column in which TRL's and others' rows have the schemas of their tools."""
_MARKS = (MARKER, "<video>", "<audio>")
_PLAYED_ELSEWHERE = {
    **dict.fromkeys(("env_name", "env_class", "env", "environment", "env_kwargs", "env_config"),
                    "an environment is named in rollout.agent and rollout.agent_options"),
    **dict.fromkeys(("system", "system_prompt"), "a system message stands in the prompt"),
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking"), "chat.template_kwargs sets it for all rows"),
    **dict.fromkeys(("max_turns", "max_steps"), "rollout.max_assistant_turns sets it for all rows"),
    **dict.fromkeys(("agent", "agent_type"), "a row names its loop in agent_name"),
    **dict.fromkeys(("interaction", "interaction_name"), "a row names its user in extra_info.interaction_kwargs.name"),
    **dict.fromkeys(("tool_choice", "parallel_tool_calls", "response_format", "stop"), "no row sets it"),
}  # fmt: skip
"""Columns that change how other systems play a row, and what does here. Tools, scorers and loops of one's own may read
them, so they are told of and not refused."""
_BUILT_IN = ("single_turn", "tool_calling", "until_finish", "checker")
"""Loops that read no column but those that a Sample has a field for."""


def tools_of_column(sample: Sample, offered: Sequence[str]) -> tuple[str, ...] | None:
    """The tools that the row's own column `tools` names, which the config must offer; None without the column."""
    if TOOLS not in sample.info:
        return None
    names = tuple(_tool_names(sample.info[TOOLS], sample))
    for name in names:
        if name not in offered:
            has = f"it has {', '.join(offered)}" if offered else "it has none"
            raise PluginError(
                f"sample {sample.id}: its column tools has {name[:LONGEST_NAME]!r}, which rollout.tools does not offer "
                f"({has}): add FILE.py:{name if name.isidentifier() and len(name) < LONGEST_NAME else 'NAME'}, or leave"
                " the column out"
            )
    return names


def _tool_names(value: Any, sample: Sample) -> Iterator[str]:
    """Of a list of names or of schemas, as TRL, OpenAI and APIGen write them; also as JSON in a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError):
            value = None
    for entry in value if isinstance(value, list) else [None]:
        if isinstance(entry, Mapping):
            inner = entry.get("function", entry)
            entry = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(entry, str) or not entry:
            raise DataError(f"sample {sample.id}: tools: expected a list of names, or of schemas with a name")
        yield entry


def check_repositories(sample: Sample, names: Sequence[str], tools: Mapping[str, Tool]) -> None:
    """The tools that work in a repository have one; otherwise the first call would end the run."""
    for name in names:
        if isinstance(tools[name], WorkspaceTool) and KEY not in sample.info.get("extra_info", {}):
            raise PluginError(f"sample {sample.id}: the tool {name} needs a repository; extra_info.{KEY} names none")


def row_notices(samples: Sequence[Sample], agents: Sequence[str], tools: Mapping[str, Tool]) -> list[str]:
    """What a person should know of rows that are played otherwise than their columns and marks say."""
    found: Counter[str] = Counter()
    for sample, agent in zip(samples, agents, strict=True):
        if agent not in _BUILT_IN:
            continue
        for column, instead in _PLAYED_ELSEWHERE.items():
            if sample.info.get(column) not in (None, "", [], {}):
                found[f"the column {column!r}, which is not read here: {instead}"] += 1
        for mark in _MARKS:
            if any(mark in text for text in _texts(sample)) and not (mark == MARKER and sample.images):
                found[f"{mark} in the prompt and no {mark[1:-1]} to stand there: it stays plain text"] += 1
    return [f"{count} samples have {text}" for text, count in found.items()] + _blind_tools(samples, tools)


def _texts(sample: Sample) -> Iterator[str]:
    return (message.text for message in sample.prompt)


def _blind_tools(samples: Sequence[Sample], tools: Mapping[str, Tool]) -> list[str]:
    """Tools that look at images where nothing brings one; another tool may make some."""
    looking = [name for name, tool in tools.items() if isinstance(tool, ImageTool | Look)]
    if not looking or len(looking) < len(tools):
        return []
    if any(sample.images or sample.tools_kwargs for sample in samples):
        return []
    return [f"no sample has an image for the tools {', '.join(looking)} to look at"]
