"""What a row's own columns ask for: its tools and its environment, and what else is told because nothing reads it."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.data.prompts import MARKER
from turnwise.errors import DataError, PluginError
from turnwise.errors.nearest_name import nearest
from turnwise.rollout.toolbox.options import environments_of
from turnwise.rollout.toolbox.toolbox import Toolbox
from turnwise.rollout.tools.tool import NeedsOfRows, Tool
from turnwise.system.plugins import LONGEST_NAME
from turnwise.types import Sample

TOOLS, ENV_NAME = "tools", "env_name"
"""The columns in which many rows have the schemas of their tools, and the environment that brings them."""
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_MARKS = (MARKER, "<video>", "<audio>")
_PLAYED_ELSEWHERE = {
    **dict.fromkeys(("env_class", "env", "environment", "env_kwargs", "env_config"),
                    "an environment is named in rollout.agent and rollout.agent_options"),
    ENV_NAME: "rollout.tool_options={TOOL: {env_names: [NAME]}} gives the tool to its rows alone",
    "multi_modal_data": "images stand in the column images",
    "functions": "schemas of tools stand in the column tools",
    **dict.fromkeys(("system", "system_prompt"), "a system message stands in the prompt"),
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking"), "chat.template_kwargs sets it for all rows"),
    **dict.fromkeys(("max_turns", "max_steps"), "rollout.max_assistant_turns sets it for all rows"),
    **dict.fromkeys(("agent", "agent_type"), "a row names its loop in agent_name"),
    **dict.fromkeys(("interaction", "interaction_name"), "a row names its user in extra_info.interaction_kwargs.name"),
    **dict.fromkeys(("temperature", "top_p", "max_tokens", "sampling_params"), "sampling sets it for all rows"),
    **dict.fromkeys(("tool_choice", "parallel_tool_calls", "response_format", "stop"), "no row sets it"),
}  # fmt: skip
"""Columns that change how other systems play a row, and what does here. Tools, scorers and loops of one's own may read
them, so they are told of and not refused."""
_ONLY_BESIDE = {
    TOOLS: "a row's tools stand in a column of its own",
    **dict.fromkeys(("videos", "video", "audios", "audio"), "only text and images are shown"),
}
"""The same of extra_info alone: as columns they are read, or refused."""
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
            own = name if name.isidentifier() and len(name) < LONGEST_NAME else "NAME"
            raise PluginError(
                f"sample {sample.id}: its column tools has {name[:LONGEST_NAME]!r}, which rollout.tools does not offer "
                f"({has}): add FILE.py:{own}, the tool or one that answers for it, or leave the column out"
            )
    return names


def _tool_names(value: Any, sample: Sample) -> Iterator[str]:
    """Of a list of names or of schemas, as OpenAI, APIGen and others write them; also as JSON in a text."""
    for entry in _entries(value):
        if isinstance(entry, Mapping):
            inner = entry.get("function", entry)
            entry = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(entry, str) or not entry:
            raise DataError(f"sample {sample.id}: tools: expected a list of names, or of schemas with a name")
        yield entry


def _entries(value: Any) -> list[Any]:
    """What a column of tools lists; [None] where it is no list."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError):
            value = None
    return value if isinstance(value, list) else [None]


def has_environment(sample: Sample) -> bool:
    """Whether the row names an environment, as DeepEyes' and CodeV's rows do where tools may be used."""
    return _environment(sample) is not None


def _environment(sample: Sample) -> Any:
    beside = sample.info.get("extra_info", {}).get(ENV_NAME)
    return next((name for name in (sample.info.get(ENV_NAME), beside) if name not in _NOTHING), None)


def tools_of_environment(
    sample: Sample, names: Sequence[str], environments: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Those of the tools that the row's environment has; `environments` are theirs, and a tool without is for all."""
    mine = _environment(sample)
    if mine is not None and not isinstance(mine, str):
        raise DataError(f"sample {sample.id}: env_name: expected the name of an environment, got {mine!r:.60}")
    known = dict.fromkeys(name for some in environments.values() for name in some)
    if mine is not None and mine not in known:
        shown = mine[:LONGEST_NAME]
        raise PluginError(f"sample {sample.id}: no tool has its env_name {shown!r}: {nearest(shown, known)}")
    return tuple(name for name in names if name not in environments or mine in environments[name])


def check_needs(sample: Sample, names: Sequence[str], tools: Mapping[str, Tool]) -> None:
    """Tools find in the sample what they work on; otherwise the first call would end the run."""
    for name in names:
        tool = tools[name]
        if isinstance(tool, NeedsOfRows) and (lacking := tool.needs(sample)) is not None:
            raise PluginError(f"sample {sample.id}: the tool {name} needs {lacking}")


def row_notices(samples: Sequence[Sample], agents: Sequence[str], toolbox: Toolbox) -> list[str]:
    """What a person should know of rows that are played otherwise than their columns and marks say."""
    counts: Counter[str] = Counter()
    told, tools = _PLAYED_ELSEWHERE | _ONLY_BESIDE, toolbox.tools
    if environments_of(toolbox.shared()):
        del told[ENV_NAME]
    for sample, agent in zip(samples, agents, strict=True):
        if agent not in _BUILT_IN:
            continue
        beside = sample.info.get("extra_info", {})
        for column, instead in told.items():
            if column not in _ONLY_BESIDE and sample.info.get(column) not in _NOTHING:
                counts[f"the column {column!r}, which is not read here: {instead}"] += 1
            if beside.get(column) not in _NOTHING:
                counts[f"'extra_info.{column}', which is not read here: {instead}"] += 1
        for name in _other_parameters(sample, tools):
            counts[f"a schema of {name!r} with other parameters than the tool has: the model is shown the tool's"] += 1
        for mark in _MARKS:
            if any(mark in text for text in _texts(sample)) and not (mark == MARKER and sample.images):
                counts[f"{mark} in the prompt but no {mark[1:-1]} for it: it stays plain text"] += 1
    return [f"{count} samples have {text}" for text, count in counts.items()] + _tools_without_images(samples, tools)


def _other_parameters(sample: Sample, tools: Mapping[str, Tool]) -> Iterator[str]:
    """Configured tools that the row's column `tools` describes otherwise."""
    for entry in _entries(sample.info.get(TOOLS)) if TOOLS in sample.info else ():
        schema = entry.get("function", entry) if isinstance(entry, Mapping) else None
        wanted = _parameters(schema)
        tool = tools.get(schema.get("name", "")) if wanted and schema is not None else None
        if tool is not None and wanted != _parameters(tool.schema["function"]):
            yield tool.name


def _parameters(schema: Any) -> set[str]:
    """The names of a function's parameters; APIGen's rows have them without `properties`."""
    parameters = schema.get("parameters") if isinstance(schema, Mapping) else None
    if not isinstance(parameters, Mapping):
        return set()
    return set(parameters.get("properties", {} if "type" in parameters else parameters))


def _texts(sample: Sample) -> Iterator[str]:
    return (message.text for message in sample.prompt)


def _tools_without_images(samples: Sequence[Sample], tools: Mapping[str, Tool]) -> list[str]:
    """Tools that look at images where nothing brings one; another tool may make some."""
    image_tools = [name for name, tool in tools.items() if getattr(tool, "reads_images", False)]
    if not image_tools or len(image_tools) < len(tools):
        return []
    if any(sample.images or sample.tools_kwargs for sample in samples):
        return []
    return [f"no sample has an image for the tools {', '.join(image_tools)} to look at"]
