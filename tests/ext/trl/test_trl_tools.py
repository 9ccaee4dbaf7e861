"""Functions written for TRL's `tools=[...]`: taken as they are, with the schema that transformers would show."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise import Message, Role, Sample, evaluate
from turnwise.data.task_config import configure
from turnwise.errors import PluginError
from turnwise.rollout.toolbox.loading import as_tool
from turnwise.types import CallStatus

HERE = Path(__file__)


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def weather(city: str, days: list[int], detailed: bool = False) -> str:
    """
    Looks the weather of a city up.

    Args:
        city: The city to look in.
        days: Which days from now on.
        detailed: Whether to tell all.

    Returns:
        What it will be like.
    """
    return f"{city}: rain on {days}"


class Counter:
    """As TRL's environment_factory takes it."""

    def reset(self, **kwargs: Any) -> str | None:
        """Start anew."""
        return None

    def increment(self, step: int) -> int:
        """Count."""
        return step


@pytest.mark.parametrize("function", [multiply, weather])
def test_the_schema_is_that_of_transformers(function: Any) -> None:
    """But for what is returned, which models are not shown here, and defaults, which are shown here."""
    from transformers.utils import get_json_schema

    theirs, ours = get_json_schema(function), as_tool(function).schema
    theirs["function"].pop("return")
    for described in ours["function"]["parameters"]["properties"].values():
        described.pop("default", None)
    assert ours == theirs


def test_both_kinds_are_called(tmp_path: Path) -> None:
    config = configure("task=null", "engine=scripted", f"runs_dir={tmp_path}", "rollout.agent=tool_calling",
                       f"rollout.tools=[{HERE}:multiply, {HERE}:weather]", "board.live=false")  # fmt: skip
    config.engine.script = [
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": [1]}}\n</tool_call>',
        "Done.",
    ]

    async def nothing(trajectory: Any) -> float:
        return 0.0

    samples = [Sample("s", (Message(Role.USER, "Go."),), "x")]
    (trajectory,) = evaluate(config, samples=samples, scorer=nothing, console=Console(quiet=True)).trajectories
    assert [call.status for call in trajectory.calls] == [CallStatus.OK, CallStatus.OK]
    assert [reply.text for reply in trajectory.turns[0].replies] == ["42", "Rome: rain on [1]"]


def test_a_class_for_environment_factory_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match=r"environment_factory.*ToolClass"):
        as_tool(Counter)
